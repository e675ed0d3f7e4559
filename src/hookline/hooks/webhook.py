"""Post JSON to a webhook from a thread; its host must be public unless it was allowed by `allow_host`."""

from __future__ import annotations

import http.client
import ipaddress
import re
import socket
import ssl
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cached_property
from time import monotonic
from typing import Any
from urllib.parse import SplitResult, urlsplit

from hookline.errors import HooklineError, RegistrationError
from hookline.hooks.queue import call_within, is_sending_suspended

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

PORTS = {"https": 443, "http": 80}
# Where clouds give a machine its credentials; most of these addresses are link-local, the ones here are not.
METADATA = frozenset(
    map(ipaddress.ip_address, ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254"))
)
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
IPV4_COMPATIBLE = ipaddress.IPv6Network("::/96")
RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504})
_CREDENTIALS = {  # by parameter: where they belong
    "webhook_url": "a webhook's secret is its path",
    "tracking_uri": "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
}
MAX_WAIT = 60.0  # seconds between two attempts, whatever Retry-After says

_HOST_NAME = re.compile(r"[A-Za-z0-9._:-]+")
_allowed: set[str] = set()


# ---- which hosts -----------------------------------------------------------------------------------------------------


def allow_host(*hosts: str) -> None:
    """Let this process's webhooks use hosts that are local or private, or plain http.

    This is possible only in code and on the command line (``--allow-host``), because a config file must not make a run
    talk to machines behind a firewall. Link-local and metadata addresses are still rejected.
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
        raise HooklineError(f"{given!r} is not a host; pass only its name or address, such as relay.example.org")
    return host.lower()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _remedy(host: str) -> str:
    return f"allow the host in code (hookline.allow_host({host!r})) or on the command line (--allow-host {host})"


def _problem_with(address: str, host: str, is_allowed: bool) -> str | None:
    """Return why nothing may be posted to an address of a host, or None if it may."""
    inner = _ipv4_inside(ipaddress.ip_address(address))
    if inner.is_link_local or inner in METADATA:
        return f"{address} is a link-local or metadata address, which is always rejected"
    if inner.is_multicast or inner.is_unspecified or (inner.is_reserved and not inner.is_loopback):
        return f"{address} is not the address of a single host"
    is_local = inner.is_loopback or not inner.is_global or getattr(inner, "is_site_local", False)
    return f"{address} is a loopback or private address; {_remedy(host)}" if is_local and not is_allowed else None


def _ipv4_inside(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address embeds in one of the five ways, or else the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in NAT64 or (address in IPV4_COMPATIBLE and int(address) > 0xFFFF):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else address)


def check_url(url: str, parameter: str) -> tuple[SplitResult, str, bool]:
    """Check that a URL from a config may be used, as far as possible without looking up its host.

    Args:
        url: The URL, which messages do not repeat.
        parameter: The name of its parameter, for messages.

    Returns:
        The parts of the URL, its host, and whether that was allowed by `allow_host`.

    Raises:
        RegistrationError: If it is not a valid URL, or one that must not be used.
    """
    if not isinstance(url, str) or not url.isascii() or not url.isprintable() or " " in url:
        raise RegistrationError(f"{parameter}: expected a URL in plain ASCII, https://host/path")
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in PORTS and _HOST_NAME.fullmatch(parts.hostname or "") and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        example = "https://host/path (in a config, ${env:NAME} keeps it secret)"
        raise RegistrationError(f"{parameter}: expected {example}")
    if parts.username is not None or parts.password is not None:
        raise RegistrationError(f"{parameter}: remove the user name or password; {_CREDENTIALS[parameter]}")
    host = _host_name(parts.hostname or "")
    is_allowed = host in _allowed
    if parts.scheme == "http" and not is_allowed:
        remedy = f"use https, or {_remedy(host)}"
        raise RegistrationError(f"{parameter}: http would send its secret unencrypted; {remedy}")
    if _is_address(host) and (problem := _problem_with(host, host, is_allowed)):
        raise RegistrationError(f"{parameter}: {problem}")
    return parts, host, is_allowed


def check_addresses(host: str, port: int, is_allowed: bool) -> None:
    """Look a host up, and raise `DeliveryError` if one of its addresses must not be used."""
    for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        if problem := _problem_with(str(entry[4][0]), host, is_allowed):
            raise DeliveryError(f"{host}: {problem}", try_again=False)


# ---- posting ---------------------------------------------------------------------------------------------------------


class DeliveryError(Exception):
    """A message was not delivered.

    Args:
        why: The reason, which must not contain more of the URL than its host.
        try_again: Whether another attempt may succeed.
        wait: The seconds that the server asked to wait before it.
    """

    def __init__(self, why: str, try_again: bool, wait: float = 0.0) -> None:
        super().__init__(why)
        self.try_again, self.wait = try_again, wait


class Webhook:
    """Posts to one URL; does not follow redirects and does not use proxies.

    Args:
        url: The URL. It is a secret; only its host may be shown.
        timeout: Seconds for each attempt, including the look-up of the host.

    Raises:
        RegistrationError: If it is not a valid URL, or one that must not be posted to; the message does not repeat it.
    """

    def __init__(self, url: str, timeout: float) -> None:
        parts, self.host, self._is_allowed = check_url(url, "webhook_url")
        self._is_encrypted, self._port = parts.scheme == "https", parts.port or PORTS[parts.scheme]
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self.timeout = timeout

    def __deepcopy__(self, memo: dict[int, Any]) -> Webhook:
        """Share the object: it does not change, and a TLS context cannot be copied."""
        return self

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()  # loading the system's certificates takes tens of milliseconds

    def post(self, body: bytes) -> None:
        """Deliver one JSON text.

        Raises:
            DeliveryError: If that fails; the message contains only the host of the URL.
        """
        if is_sending_suspended():
            return
        connection = http.client.HTTPConnection(self.host, self._port, timeout=self.timeout)
        if self._is_encrypted:
            connection = http.client.HTTPSConnection(self.host, self._port, timeout=self.timeout, context=self._tls)
        deadline = monotonic() + self.timeout

        def attempt() -> tuple[int, float]:
            with closing(connection):
                return self._request(connection, body, deadline)

        # A look-up cannot be interrupted, and a socket's timeout restarts with every byte a slow server sends. So the
        # attempt has a thread, which is abandoned when the time is over.
        try:
            status, wait = call_within(self.timeout, attempt, "hookline-webhook")
        except DeliveryError:
            raise
        except TimeoutError:
            with suppress(OSError, AttributeError):  # end a read that is in progress; there may be no socket
                connection.sock.shutdown(socket.SHUT_RDWR)
            raise DeliveryError(f"{self.host}: no answer within {self.timeout:g} s", try_again=True) from None
        except Exception as error:  # http.client, ssl and the name codecs each have their own types.
            # The text of an error may contain a part of the URL; the system's description of one does not.
            detail = f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""
            may_succeed = not isinstance(error, ssl.SSLError)
            raise DeliveryError(f"{self.host}: {type(error).__name__}{detail}", may_succeed) from None
        if not 200 <= status < 300:
            redirect = " (redirects are not followed)" if 300 <= status < 400 else ""
            raise DeliveryError(f"{self.host}: HTTP {status}{redirect}", status in RETRYABLE, wait)

    def _request(self, connection: http.client.HTTPConnection, body: bytes, deadline: float) -> tuple[int, float]:
        """Make one request, and return the status and how many seconds the server asked to wait.

        The connection looks the host up again after its addresses were checked, so a name server that answers
        differently then is not detected.
        """
        check_addresses(self.host, self._port, self._is_allowed)
        if monotonic() < deadline:
            connection.connect()
        if monotonic() >= deadline:  # a message sent after the deadline would be sent again by the next attempt
            raise TimeoutError
        headers = {"Content-Type": "application/json", "Connection": "close", "User-Agent": "hookline"}
        connection.request("POST", self._path, body, headers)
        with connection.getresponse() as response:
            wait = response.getheader("Retry-After") or ""
            return response.status, min(float(wait), MAX_WAIT) if wait.isdecimal() else 0.0
