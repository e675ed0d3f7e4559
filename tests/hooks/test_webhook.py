"""A webhook posts only to hosts that it may use, and reports what went wrong without showing its URL."""

import copy
import http.client
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import hookline as hl
from hookline import HooklineError
from hookline.errors import RegistrationError

from .conftest import Server, dripping, garbage, send, silent, status


def notify(url: str, timeout: float = 5.0, **options: Any) -> hl.NotifyHook:
    """A hook that makes a second attempt at once if another may succeed."""
    return hl.NotifyHook(url, [], timeout=timeout, **{"retries": 1, "backoff": 0.0, **options})


def failure(hook: hl.NotifyHook) -> str | None:
    """Send a message, and return why it was not delivered."""
    return next((note["why"] for note in send(hook, "hello") if note["kind"] == "notification_failed"), None)


def look_up(monkeypatch: pytest.MonkeyPatch, host: str, answer: Any) -> list[str]:
    """Answer the look-ups of one host, and return the list to which each is appended."""
    real, names = socket.getaddrinfo, list[str]()

    def getaddrinfo(name: str, port: int, *rest: Any, **more: Any) -> Any:
        if name != host:  # such as a literal address when connecting
            return real(name, port, *rest, **more)
        names.append(name)
        return [(2, 1, 6, "", (address, port)) for address in answer()]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return names


def test_it_posts_json_with_the_host_s_name(server: Server) -> None:
    """With a JSON content type, the Host of the URL, and its path with the query."""
    hl.allow_host("localhost")
    url = server.url.replace("127.0.0.1", "LocalHost")
    assert failure(notify(f"{url}?b=c")) is None
    assert server.texts[0].endswith("] hello")
    headers = server.requests[0].headers
    assert headers["Host"] == f"localhost:{server.server_port}"
    assert headers["Content-Type"] == "application/json"
    assert server.requests[0].path == "/services/T000/SECRETPART?b=c"


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("ftp://example.org/x", "expected https://host/path"),
        ("example.org/x", "expected https://host/path"),
        ("https:///x", "expected https://host/path"),
        ("https://example.org:0/x", "expected https://host/path"),
        ("https://example.org:99999/x", "expected https://host/path"),
        ("https://exa mple.org/x", "expected a URL in plain ASCII"),
        ("https://example.org/x\r\nX-Evil: 1", "expected a URL in plain ASCII"),
        ("https://exämple.org/x", "expected a URL in plain ASCII"),
        ("https://me:pw@example.org/x", "remove the user name or password"),
        ("http://example.org/x", "http would send its secret unencrypted"),
        ("${env:SLACK_URL}", "expected https://host/path"),
        (None, "expected a URL"),
        ("https://127.0.0.1/x", "127.0.0.1 is a loopback or private address"),
        ("https://[::1]:8443/x", "::1 is a loopback or private address"),
        ("https://169.254.169.254/latest", "always rejected"),
    ],
)
def test_an_invalid_url_is_rejected_at_once(url: Any, complaint: str) -> None:
    """Without a look-up of the host, and without repeating the URL in the error."""
    with pytest.raises(RegistrationError, match=complaint) as caught:
        hl.NotifyHook(url)
    if isinstance(url, str):
        assert url not in str(caught.value)


@pytest.mark.parametrize(("url", "port"), [("https://relay.corp/x", 443), ("http://relay.corp/x", 80)])
def test_a_scheme_has_its_port(url: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL without a port posts to that of https or http."""
    asked: list[int] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, **more: asked.append(port) or 1 / 0)
    hl.allow_host("relay.corp")
    assert failure(notify(url, retries=0)) == "relay.corp: ZeroDivisionError" and asked == [port]


ALWAYS_REJECTED = [
    "169.254.169.254", "169.254.0.23", "fe80::1", "fe80::1%1", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe",
    "2002:a9fe:a9fe::1", "::169.254.169.254", "fd00:ec2::254", "100.100.100.200", "168.63.129.16", "192.0.0.192",
    "224.0.0.1", "ff02::1", "0.0.0.0", "::", "240.0.0.1", "255.255.255.255",
]  # fmt: skip
ONLY_WHEN_ALLOWED = [
    "127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1",
    "fd12:3456::1", "fec0::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::1",
]  # fmt: skip
PUBLIC = ["93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946"]


@pytest.fixture
def no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every connection fail with an error that says that it was tried."""

    def connect(address: Any, *rest: Any) -> Any:
        raise OSError(0, "connecting")

    monkeypatch.setattr(socket, "create_connection", connect)


@pytest.mark.parametrize("address", ALWAYS_REJECTED)
@pytest.mark.usefixtures("no_connection")
def test_link_local_and_metadata_addresses_are_always_rejected(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every way of writing them, and also when the host was allowed; nothing is sent, and only one attempt made."""
    hl.allow_host("relay.corp")
    attempts = look_up(monkeypatch, "relay.corp", lambda: [PUBLIC[0], address])
    why = failure(notify("https://relay.corp/x"))
    assert why in (
        f"relay.corp: {address} is a link-local or metadata address, which is always rejected",
        f"relay.corp: {address} is not the address of a single host",
    )
    assert len(attempts) == 1


@pytest.mark.parametrize("address", ONLY_WHEN_ALLOWED)
@pytest.mark.usefixtures("no_connection")
def test_local_and_private_addresses_must_be_allowed(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected with the remedy, unless the host was allowed in code or on the command line."""
    attempts = look_up(monkeypatch, "relay.corp", lambda: [PUBLIC[0], address])
    why = failure(notify("https://relay.corp/x"))
    assert why is not None and why.startswith(f"relay.corp: {address} is a loopback or private address")
    assert why.endswith("(--allow-host relay.corp)")  # the remedy names the host, not its address
    assert len(attempts) == 1
    hl.allow_host("relay.corp")
    assert failure(notify("https://relay.corp/x")) == "relay.corp: OSError (connecting)"


@pytest.mark.parametrize("address", PUBLIC)
@pytest.mark.usefixtures("no_connection")
def test_public_addresses_are_fine(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Public addresses need not be allowed."""
    look_up(monkeypatch, "relay.corp", lambda: [address])
    assert failure(notify("https://relay.corp/x")) == "relay.corp: OSError (connecting)"


def test_the_other_addresses_are_tried(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host may have an address that does not answer."""
    hl.allow_host("two.example.org")
    look_up(monkeypatch, "two.example.org", lambda: ["127.0.0.2", "127.0.0.1"])
    assert failure(notify(f"http://two.example.org:{server.server_port}/x")) is None
    assert len(server.received) == 1


def test_the_timeout_includes_the_look_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow name server uses up the attempt's time, and nothing is sent after it."""
    answered = threading.Event()
    hl.allow_host("slow.example.org")
    attempts = look_up(monkeypatch, "slow.example.org", lambda: answered.wait() and ["127.0.0.1"])
    why = failure(notify(f"http://slow.example.org:{server.server_port}/x", timeout=0.5))
    assert why == "slow.example.org: no answer within 0.5 s" and len(attempts) == 2
    answered.set()
    for thread in threading.enumerate():
        if thread.name == "hookline-webhook":
            thread.join()
    assert server.received == []


def test_a_name_that_is_not_found_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the look-up is reported."""

    def nothing() -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    attempts = look_up(monkeypatch, "gone.example.org", nothing)
    why = failure(notify("https://gone.example.org/x"))
    assert why == "gone.example.org: gaierror (Name or service not known)" and len(attempts) == 2


def test_every_message_checks_the_host_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the host's address changes to a rejected one, nothing is sent any more."""
    addresses = ["127.0.0.1"]
    hl.allow_host("relay.example.org")
    look_up(monkeypatch, "relay.example.org", lambda: addresses)
    hook = notify(f"http://relay.example.org:{server.server_port}/x")
    assert failure(hook) is None
    assert [request.headers["Host"] for request in server.requests] == [f"relay.example.org:{server.server_port}"]
    addresses[0] = "169.254.169.254"
    assert "always rejected" in str(failure(hook))
    assert len(server.received) == 1


@pytest.mark.parametrize(
    ("answer", "timeout", "why", "attempts"),
    [
        pytest.param(status(404), 60.0, "HTTP 404", 1, id="not found"),
        pytest.param(
            status(302, Location="http://169.254.169.254/"), 60.0, "HTTP 302 (redirects are not followed)", 1,
            id="redirect",
        ),
        pytest.param(status(500), 60.0, "HTTP 500", 2, id="broken"),
        pytest.param(status(429), 60.0, "HTTP 429", 2, id="busy"),
        pytest.param(garbage, 60.0, "BadStatusLine", 2, id="garbage"),
        pytest.param(silent, 1.0, "no answer within 1 s", 2, id="silent"),
        pytest.param(dripping, 1.0, "no answer within 1 s", 2, id="dripping"),
    ],
)  # fmt: skip
def test_bad_answers_are_reported(server: Server, answer: Any, timeout: float, why: str, attempts: int) -> None:
    """Another attempt is made where it may help; one that has no answer ends, and none shows the secret."""
    server.then = answer
    hook = notify(server.url, timeout=timeout, wait_at_end=600.0)
    assert failure(hook) == f"127.0.0.1: {why}"
    while len(server.received) < attempts:  # the server may read a message after its sender has given up
        time.sleep(0.005)
    assert len(server.received) == attempts


def test_an_error_of_any_type_is_reported_without_its_text(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text may contain the URL; the next message is sent."""
    real, errors = http.client.HTTPConnection.request, [ValueError("/services/SECRETPART")]

    def request(*arguments: Any) -> None:
        if errors:
            raise errors.pop()
        real(*arguments)

    monkeypatch.setattr(http.client.HTTPConnection, "request", request)
    failed, counts = send(notify(server.url, retries=0), "one", "two")
    assert failed["why"] == "127.0.0.1: ValueError" and (counts["sent"], counts["failed"]) == (1, 1)
    assert server.texts[0].endswith("] two")


def test_a_refused_connection_is_tried_again(server: Server) -> None:
    """The reason is the system's."""
    server.shutdown()
    server.server_close()
    assert "127.0.0.1: ConnectionRefusedError" in str(failure(notify(server.url)))


@pytest.mark.parametrize("host", ["https://example.org", "example.org:443", "", "a b"])
def test_an_invalid_host_is_rejected(host: str) -> None:
    """A URL or a port in the place of a host is a mistake."""
    with pytest.raises(HooklineError, match="is not a host"):
        hl.allow_host(host)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Make a key and a self-signed certificate for `localhost`."""
    folder = tmp_path_factory.mktemp("tls")
    key, made = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(made), "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost"]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("openssl is not here to make a certificate")
    return key, made


def test_tls_checks_the_certificate_against_the_name(
    server: Server, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server gets the host's name (SNI), and its certificate must be valid for it; a copy of the hook works too."""
    names: list[Any] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate[1], certificate[0])
    context.sni_callback = lambda sock, name, ctx: names.append(name)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    hl.allow_host("localhost", "127.0.0.1")
    url = f"https://localhost:{server.server_port}/services/SECRETPART"
    refused = notify(url)
    assert str(failure(refused)).startswith("localhost: SSLCertVerificationError") and len(names) == 1
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[1]))
    hook = notify(url)
    assert failure(hook) is None and failure(copy.deepcopy(hook)) is None
    assert len(server.received) == 2 and set(names) == {"localhost"}
    other = notify(url.replace("localhost", "127.0.0.1"))
    assert str(failure(other)).startswith("127.0.0.1: SSLCertVerificationError")
