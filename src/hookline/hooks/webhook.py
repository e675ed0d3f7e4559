"""One POST to a webhook: the host is looked up once, judged, and talked to at the addresses found then, no other."""

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
from time import monotonic
from typing import Any
from urllib.parse import SplitResult, urlsplit

from hookline.errors import HooklineError, RegistrationError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

PORTS = {"https": 443, "http": 80}
# Where clouds tell a machine its credentials; most of them are link-local, these are not.
METADATA = frozenset(
    map(ipaddress.ip_address, ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254"))
)
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
COMPATIBLE = ipaddress.IPv6Network("::/96")
TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
LONGEST_WAIT = 60.0  # seconds, whatever a server asks for

_HOST_NAME = re.compile(r"[A-Za-z0-9._:-]+")
_allowed: set[str] = set()


def allow_host(*hosts: str) -> None:
    """Let webhooks of this process lead to these hosts though they are local or private, or speak http without TLS.

    It can be said in code and on the command line (``--allow-host``) only: a config file must not be able to make a
    run talk to what lies behind a firewall. Link-local and metadata addresses stay refused.
    """
    _allowed.update(map(_host_name, hosts))


@contextmanager
def hosts_allowed(hosts: Iterable[str]) -> Iterator[None]:
    """The same for as long as the block lasts."""
    before = set(_allowed)
    allow_host(*hosts)
    try:
        yield
    finally:
        _allowed.intersection_update(before)


def _host_name(given: str) -> str:
    host = given.strip().strip("[]")
    if not _HOST_NAME.fullmatch(host) or (":" in host and not _is_address(host)):
        raise HooklineError(f"{given!r} is no host; write its name or address alone, for instance relay.example.org")
    return host.lower()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Undelivered(Exception):
    """A message did not arrive; says whether trying again may help, and how long the server asked to wait."""

    def __init__(self, why: str, try_again: bool, wait: float = 0.0) -> None:
        super().__init__(why)
        self.try_again, self.wait = try_again, wait


@dataclass(frozen=True)
class Place:
    """Where a webhook lies. Only `host` may be shown: the rest of a webhook's URL is a secret."""

    scheme: str
    host: str
    port: int
    path: str
    named: bool
    """Whether the host was named with `allow_host`."""


def read_url(url: str) -> Place:
    """The parts of a URL that may be posted to; what is wrong with another is said without repeating it."""
    parts = _split(url)
    if parts.username is not None or parts.password is not None:
        raise RegistrationError("webhook_url: it holds a user name or password; a webhook's secret is its path")
    host = _host_name(parts.hostname or "")
    named = host in _allowed
    if parts.scheme == "http" and not named:
        raise RegistrationError(f"webhook_url: http would send its secret unencrypted; use https, or {_remedy(host)}")
    if _is_address(host) and (problem := problem_with(host, named, host)):
        raise RegistrationError(f"webhook_url: {problem}")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Place(parts.scheme, host, parts.port or PORTS[parts.scheme], path, named)


def _split(url: str) -> SplitResult:
    if not isinstance(url, str) or not url.isascii() or not url.isprintable() or " " in url:
        raise RegistrationError("webhook_url: expected a URL in plain ASCII, https://host/path")
    try:
        parts = urlsplit(url)
        valid = parts.scheme in PORTS and bool(parts.hostname) and parts.port != 0
        valid = valid and _HOST_NAME.fullmatch(parts.hostname or "") is not None
    except ValueError:
        valid = False
    if not valid:
        raise RegistrationError("webhook_url: expected https://host/path (in a config, ${env:NAME} keeps it secret)")
    return parts


def _remedy(host: str) -> str:
    return f"name the host in code (hookline.allow_host({host!r})) or on the command line (--allow-host {host})"


def problem_with(address: str, named: bool, host: str) -> str | None:
    """Why nothing may be posted to an address of a host; None when it may. `named`: by `allow_host`, the host was."""
    found = _embedded(ipaddress.ip_address(address))
    if found.is_link_local or found in METADATA:
        return f"{address} is a link-local or metadata address, which is always refused"
    local = found.is_loopback or not found.is_global or getattr(found, "is_site_local", False)
    if found.is_multicast or found.is_unspecified or (found.is_reserved and not found.is_loopback):
        return f"{address} is no single host's address"
    return f"{address} is a loopback or private address; {_remedy(host)}" if local and not named else None


def _embedded(address: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for, in any of the five ways; else the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in NAT64 or (address in COMPATIBLE and int(address) > 0xFFFF):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else address)


class Deadline:
    """When an attempt is over, whatever it waits for."""

    def __init__(self, seconds: float) -> None:
        self._until = monotonic() + seconds

    @property
    def passed(self) -> bool:
        """Whether it is."""
        return monotonic() >= self._until

    def left(self) -> float:
        """The seconds that are left; when there are none, that is an error."""
        if self.passed:
            raise TimeoutError
        return max(self._until - monotonic(), 1e-3)


class Webhook:
    """Posts to one place, with a deadline for each attempt; follows no redirect and heeds no proxy."""

    def __init__(self, url: str, timeout: float) -> None:
        self.place = read_url(url)
        self.timeout = timeout
        self._addresses: list[str] = []  # that were judged, the one that answered last in front

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """The system's certificates: reading them takes tens of milliseconds, so it is done once."""
        return ssl.create_default_context()

    def post(self, body: bytes) -> None:
        """Deliver one JSON text; raises `Undelivered`, whose message holds nothing of the URL but its host."""
        connection, deadline = self._connection(), Deadline(self.timeout)
        try:
            connection.sock = self._reach(deadline)
            with _hanging_up(connection, deadline):
                self._encrypt(connection, deadline)
                status, wait = self._ask(connection, body)
        except (OSError, http.client.HTTPException) as error:
            why = f"no answer within {self.timeout:g} s" if deadline.passed else _plainly(error)
            raise Undelivered(f"{self.place.host}: {why}", try_again=not isinstance(error, ssl.SSLError)) from None
        finally:
            connection.close()
        self._judge(status, wait)

    def _connection(self) -> http.client.HTTPConnection:
        if self.place.scheme == "http":
            return http.client.HTTPConnection(self.place.host, self.place.port, timeout=self.timeout)
        return http.client.HTTPSConnection(self.place.host, self.place.port, timeout=self.timeout, context=self._tls)

    def _reach(self, deadline: Deadline) -> socket.socket:
        """A connection to the first of the judged addresses that takes one; it is asked first the next time."""
        *others, last = self.addresses(deadline)
        for address in others:
            with suppress(OSError):
                return self._connected(address, deadline.left() / (len(others) + 1))
        return self._connected(last, deadline.left())

    def _connected(self, address: str, seconds: float) -> socket.socket:
        reached = socket.create_connection((address, self.place.port), seconds)
        self._addresses = [address, *(other for other in self._addresses if other != address)]
        return reached

    def _encrypt(self, connection: http.client.HTTPConnection, deadline: Deadline) -> None:
        """The host's name, not the address, goes into the certificate check, SNI and Host."""
        connection.sock.settimeout(deadline.left())
        if self.place.scheme == "https":
            plain, host = connection.sock, self.place.host
            connection.sock = encrypted = self._tls.wrap_socket(
                plain, server_hostname=host, do_handshake_on_connect=False
            )
            deadline.left()  # it may have passed while neither of the two could be hung up
            encrypted.do_handshake()  # by itself, so that the deadline can end it, too

    def _ask(self, connection: http.client.HTTPConnection, body: bytes) -> tuple[int, float]:
        """The answer's status, and for how many seconds it asks to be left alone."""
        headers = {"Content-Type": "application/json", "Connection": "close", "User-Agent": "hookline"}
        connection.request("POST", self.place.path, body, headers)
        with connection.getresponse() as answer:
            asked = answer.getheader("Retry-After") or ""
            return answer.status, min(float(asked), LONGEST_WAIT) if asked.isdecimal() else 0.0

    def _judge(self, status: int, wait: float) -> None:
        if 200 <= status < 300:
            return
        moved = " (redirects are not followed)" if 300 <= status < 400 else ""
        raise Undelivered(f"{self.place.host}: HTTP {status}{moved}", try_again=status in TRY_AGAIN, wait=wait)

    def addresses(self, deadline: Deadline) -> list[str]:
        """Where the host is: looked up once, so that no later answer of a name server can lead elsewhere."""
        if not self._addresses:
            found = _look_up(self.place, deadline)
            for address in found:
                if problem := problem_with(address, self.place.named, self.place.host):
                    raise Undelivered(f"{self.place.host}: {problem}", try_again=False)
            self._addresses = found
        return self._addresses


def _look_up(place: Place, deadline: Deadline) -> list[str]:
    """The host's addresses, in the name server's order. Looking up cannot be interrupted, so a thread is left to it."""
    answer: list[Any] = []

    def ask() -> None:
        try:
            found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
            answer.append(list(dict.fromkeys(str(entry[4][0]) for entry in found)))
        except Exception as error:  # told by whoever waits
            answer.append(error)

    asking = threading.Thread(target=ask, name="hookline-look-up", daemon=True)
    asking.start()
    asking.join(deadline.left())
    if not answer:
        raise TimeoutError
    if isinstance(answer[0], Exception):
        raise answer[0]
    return list(answer[0])


@contextmanager
def _hanging_up(connection: http.client.HTTPConnection, deadline: Deadline) -> Iterator[None]:
    """Hang up at the deadline. A socket's own timeout begins anew with every byte; this one does not."""
    alarm = threading.Timer(deadline.left(), _hang_up, (connection,))
    alarm.daemon = True
    alarm.start()
    try:
        yield
    finally:
        alarm.cancel()


def _hang_up(connection: http.client.HTTPConnection) -> None:
    with suppress(OSError, AttributeError):  # nothing is open any more
        connection.sock.shutdown(socket.SHUT_RDWR)


def _plainly(error: Exception) -> str:
    """What went wrong, in words that cannot hold a piece of the URL."""
    detail = error.strerror if isinstance(error, OSError) else None
    return f"{type(error).__name__}{f' ({detail})' if detail else ''}"
