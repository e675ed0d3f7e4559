"""Post JSON to a webhook, whose host must be public unless it was allowed by `allow_host`."""

from __future__ import annotations

import http.client
import ipaddress
import re
import socket
import ssl
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from queue import Empty, SimpleQueue
from time import monotonic
from urllib.parse import urlsplit

from hookline.errors import HooklineError, RegistrationError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

PORTS = {"https": 443, "http": 80}
# Where clouds give a machine its credentials; most of these addresses are link-local, the ones here are not.
METADATA = frozenset(
    map(ipaddress.ip_address, ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254"))
)
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
IPV4_COMPATIBLE = ipaddress.IPv6Network("::/96")
RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504})
LONGEST_WAIT = 60.0  # seconds, whatever Retry-After says

_HOST_NAME = re.compile(r"[A-Za-z0-9._:-]+")
_allowed: set[str] = set()


# ---- which hosts -----------------------------------------------------------------------------------------------------


def allow_host(*hosts: str) -> None:
    """Let this process's webhooks use hosts that are local or private, or plain http.

    This is possible in code and on the command line (``--allow-host``) only: a config file must not be able to make a
    run talk to machines behind a firewall. Link-local and metadata addresses are still rejected.
    """
    _allowed.update(map(_host_name, hosts))


@contextmanager
def hosts_allowed(hosts: Iterable[str]) -> Iterator[None]:
    """Allow hosts inside a block."""
    before = set(_allowed)
    allow_host(*hosts)
    try:
        yield
    finally:
        _allowed.intersection_update(before)


def _host_name(given: str) -> str:
    host = given.strip().strip("[]")
    if not _HOST_NAME.fullmatch(host) or (":" in host and not _is_address(host)):
        raise HooklineError(f"{given!r} is not a host; give its name or address alone, such as relay.example.org")
    return host.lower()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Target:
    """Where a webhook posts to. Only `host` may be shown: the rest of the URL is a secret."""

    scheme: str
    host: str
    port: int
    path: str
    named: bool
    """Whether the host was allowed by `allow_host`."""


def read_url(url: str) -> Target:
    """Parse the URL of a webhook; errors do not repeat it.

    Raises:
        RegistrationError: If it is not a valid URL, or one that must not be posted to.
    """
    if not isinstance(url, str) or not url.isascii() or not url.isprintable() or " " in url:
        raise RegistrationError("webhook_url: expected a URL in plain ASCII, https://host/path")
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in PORTS and _HOST_NAME.fullmatch(parts.hostname or "") and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise RegistrationError("webhook_url: expected https://host/path (in a config, ${env:NAME} keeps it secret)")
    if parts.username is not None or parts.password is not None:
        raise RegistrationError("webhook_url: remove the user name or password; a webhook's secret is its path")
    host = _host_name(parts.hostname or "")
    named = host in _allowed
    if parts.scheme == "http" and not named:
        raise RegistrationError(f"webhook_url: http would send its secret unencrypted; use https, or {_remedy(host)}")
    if _is_address(host) and (problem := problem_with(host, named, host)):
        raise RegistrationError(f"webhook_url: {problem}")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.scheme, host, parts.port or PORTS[parts.scheme], path, named)


def _remedy(host: str) -> str:
    return f"allow the host in code (hookline.allow_host({host!r})) or on the command line (--allow-host {host})"


def problem_with(address: str, named: bool, host: str) -> str | None:
    """Return why nothing may be posted to an address, or None if it may.

    Args:
        address: An address of the host.
        named: Whether the host was allowed by `allow_host`.
        host: The host, for the message.
    """
    found = _ipv4_inside(ipaddress.ip_address(address))
    if found.is_link_local or found in METADATA:
        return f"{address} is a link-local or metadata address, which is always rejected"
    if found.is_multicast or found.is_unspecified or (found.is_reserved and not found.is_loopback):
        return f"{address} is not the address of a single host"
    is_local = found.is_loopback or not found.is_global or getattr(found, "is_site_local", False)
    return f"{address} is a loopback or private address; {_remedy(host)}" if is_local and not named else None


def _ipv4_inside(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address embeds in one of the five ways, or else the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in NAT64 or (address in IPV4_COMPATIBLE and int(address) > 0xFFFF):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else address)


# ---- posting ---------------------------------------------------------------------------------------------------------


class DeliveryError(Exception):
    """A message was not delivered.

    Args:
        why: The reason, which must not contain more of the URL than its host.
        try_again: Whether another attempt may succeed.
        wait: How many seconds the server asked to wait before it.
    """

    def __init__(self, why: str, try_again: bool, wait: float = 0.0) -> None:
        super().__init__(why)
        self.try_again, self.wait = try_again, wait


class Webhook:
    """Posts to one URL; does not follow redirects and does not use proxies.

    Args:
        url: The URL, a secret.
        timeout: Seconds for each attempt, including the look-up of the host.

    Raises:
        RegistrationError: If the URL is invalid.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self.target = read_url(url)
        self.timeout = timeout

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()  # reading the system's certificates takes tens of milliseconds

    def post(self, body: bytes) -> None:
        """Deliver one JSON text.

        Raises:
            DeliveryError: If that fails; the message contains nothing of the URL but its host.
        """
        target = self.target
        if target.scheme == "http":
            connection = http.client.HTTPConnection(target.host, target.port, timeout=self.timeout)
        else:
            connection = http.client.HTTPSConnection(target.host, target.port, timeout=self.timeout, context=self._tls)
        deadline = monotonic() + self.timeout
        outcome: SimpleQueue[tuple[int, float] | Exception] = SimpleQueue()

        def attempt() -> None:
            try:
                outcome.put(self._request(connection, body, deadline))
            except Exception as error:
                outcome.put(error)
            finally:
                connection.close()

        # A look-up cannot be interrupted, and a socket's timeout restarts with every byte a slow server sends. So the
        # attempt has a thread, which is abandoned when the time is over.
        threading.Thread(target=attempt, name="hookline-webhook", daemon=True).start()
        try:
            found = outcome.get(timeout=self.timeout)
        except Empty:
            found = TimeoutError()
            with suppress(OSError, AttributeError):  # end a read that is in progress; there may be no socket
                connection.sock.shutdown(socket.SHUT_RDWR)
        if isinstance(found, DeliveryError):
            raise found
        if isinstance(found, TimeoutError):
            raise DeliveryError(f"{target.host}: no answer within {self.timeout:g} s", try_again=True)
        if isinstance(found, Exception):
            # The text of other errors may contain a part of the URL; the system's description of one does not.
            detail = f" ({found.strerror})" if isinstance(found, OSError) and found.strerror else ""
            is_final = isinstance(found, ssl.SSLError)
            raise DeliveryError(f"{target.host}: {type(found).__name__}{detail}", try_again=not is_final)
        status, wait = found
        if not 200 <= status < 300:
            redirect = " (redirects are not followed)" if 300 <= status < 400 else ""
            raise DeliveryError(f"{target.host}: HTTP {status}{redirect}", status in RETRYABLE, wait)

    def _request(self, connection: http.client.HTTPConnection, body: bytes, deadline: float) -> tuple[int, float]:
        """Make one request, and return the status and how many seconds the server asked to wait.

        The connection looks the host up again after its addresses were checked, so a name server that answers
        differently then is not detected.
        """
        target = self.target
        for entry in socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM):
            if problem := problem_with(str(entry[4][0]), target.named, target.host):
                raise DeliveryError(f"{target.host}: {problem}", try_again=False)
        if monotonic() < deadline:
            connection.connect()
        if monotonic() >= deadline:  # a message sent after the deadline would be sent again by the next attempt
            raise TimeoutError
        headers = {"Content-Type": "application/json", "Connection": "close", "User-Agent": "hookline"}
        connection.request("POST", target.path, body, headers)
        with connection.getresponse() as response:
            wait = response.getheader("Retry-After") or ""
            return response.status, min(float(wait), LONGEST_WAIT) if wait.isdecimal() else 0.0
