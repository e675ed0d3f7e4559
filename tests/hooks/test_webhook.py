"""A webhook posts only to hosts that it may use."""

import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hookline import HooklineError, allow_host
from hookline.errors import RegistrationError
from hookline.hooks.webhook import DeliveryError, Webhook, hosts_allowed, problem_with, read_url

from .conftest import Server, dripping, garbage, silent, status


def test_it_posts_json_with_the_host_s_name(server: Server) -> None:
    """The body arrives as it is, with a JSON content type and the Host of the URL."""
    allow_host("localhost")
    Webhook(server.url.replace("127.0.0.1", "localhost"), 5).post(b'{"text": "hello"}')
    assert server.received == [{"text": "hello"}]
    headers = server.requests[0].headers
    assert headers["Host"] == f"localhost:{server.server_port}"
    assert headers["Content-Type"] == "application/json"
    assert server.requests[0].path == "/services/T000/SECRETPART"


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
        read_url(url)
    if isinstance(url, str):
        assert url not in str(caught.value)


def test_the_parts_of_a_good_url() -> None:
    """Host in lower case, the scheme's port, the path with its query."""
    place = read_url("https://Hooks.Example.org/services/a?b=c")
    assert (place.scheme, place.host, place.port, place.path) == ("https", "hooks.example.org", 443, "/services/a?b=c")


ALWAYS_REJECTED = [
    "169.254.169.254", "169.254.0.23", "fe80::1", "fe80::1%1", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe",
    "2002:a9fe:a9fe::1", "::169.254.169.254", "fd00:ec2::254", "100.100.100.200", "168.63.129.16", "192.0.0.192",
    "224.0.0.1", "ff02::1", "0.0.0.0", "::", "240.0.0.1", "255.255.255.255",
]  # fmt: skip
ONLY_WHEN_ALLOWED = [
    "127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1",
    "fd12:3456::1", "fec0::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::1",
]  # fmt: skip


@pytest.mark.parametrize("address", ALWAYS_REJECTED)
def test_link_local_and_metadata_addresses_are_always_rejected(address: str) -> None:
    """In every way of writing them, and also when the host was named."""
    assert problem_with(address, named=False, host="relay.corp")
    assert problem_with(address, named=True, host="relay.corp")


@pytest.mark.parametrize("address", ONLY_WHEN_ALLOWED)
def test_local_and_private_addresses_must_be_allowed(address: str) -> None:
    """Rejected with the remedy, unless the host was allowed in code or on the command line."""
    assert "--allow-host relay.corp" in str(problem_with(address, named=False, host="relay.corp"))
    assert problem_with(address, named=True, host="relay.corp") is None


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946"])
def test_public_addresses_are_fine(address: str) -> None:
    """Public addresses need not be allowed."""
    assert problem_with(address, named=False, host="relay.corp") is None


def test_a_name_with_a_private_address_is_rejected_when_it_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent to it, and the attempt is not repeated."""
    answers = [("93.184.216.34", 443), ("10.0.0.7", 443)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: [(2, 1, 6, "", answer) for answer in answers])
    monkeypatch.setattr(socket, "create_connection", lambda *a, **k: pytest.fail("it connected"))
    with pytest.raises(DeliveryError, match=r"evil\.example\.org: 10\.0\.0\.7 is a loopback or private") as caught:
        Webhook("https://evil.example.org/x", 1).post(b"{}")
    assert not caught.value.try_again
    assert str(caught.value).endswith("(--allow-host evil.example.org)")  # what was judged is the host that was named


def test_the_other_addresses_are_tried(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host may have an address that does not answer."""
    answers = [(2, 1, 6, "", (address, server.server_port)) for address in ("127.0.0.2", "127.0.0.1")]
    allow_host("two.example.org")
    monkeypatch.setattr(socket, "getaddrinfo", _only_for("two.example.org", lambda name: answers))
    Webhook(f"http://two.example.org:{server.server_port}/x", 5).post(b"{}")
    assert len(server.received) == 1


def test_the_timeout_includes_the_look_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow name server uses up the attempt's time, and nothing is sent after it."""
    answered = threading.Event()

    def slow(name: str) -> Any:
        answered.wait(30)
        return [(2, 1, 6, "", ("127.0.0.1", server.server_port))]

    allow_host("slow.example.org")
    monkeypatch.setattr(socket, "getaddrinfo", _only_for("slow.example.org", slow))
    with pytest.raises(DeliveryError, match=r"slow\.example\.org: no answer within 0\.1 s") as caught:
        Webhook(f"http://slow.example.org:{server.server_port}/x", 0.1).post(b"{}")
    assert caught.value.try_again
    answered.set()
    for thread in threading.enumerate():
        if thread.name == "hookline-webhook":
            thread.join()
    assert server.received == []


def test_a_name_that_is_not_found_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the look-up is reported."""

    def nothing(name: str) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", _only_for("gone.example.org", nothing))
    with pytest.raises(DeliveryError, match=r"gone\.example\.org: gaierror \(Name or service not known\)") as caught:
        Webhook("https://gone.example.org/x", 1).post(b"{}")
    assert caught.value.try_again


def test_every_message_checks_the_host_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the host's address changes to a rejected one, nothing is sent any more."""
    addresses = ["127.0.0.1"]
    answers = lambda name: [(2, 1, 6, "", (addresses[0], server.server_port))]  # noqa: E731
    allow_host("relay.example.org")
    made = Webhook(f"http://relay.example.org:{server.server_port}/x", 5)
    monkeypatch.setattr(socket, "getaddrinfo", _only_for("relay.example.org", answers))
    made.post(b"{}")
    assert [request.headers["Host"] for request in server.requests] == [f"relay.example.org:{server.server_port}"]
    addresses[0] = "169.254.169.254"
    with pytest.raises(DeliveryError, match="always rejected"):
        made.post(b"{}")
    assert len(server.received) == 1


def _only_for(host: str, lookup: Any) -> Any:
    """Leave lookups of other hosts, such as those of a literal address when connecting, to the system."""
    real = socket.getaddrinfo
    return lambda name, *rest, **more: lookup(name) if name == host else real(name, *rest, **more)


@pytest.mark.parametrize(
    ("answer", "why", "try_again"),
    [
        (status(404), "HTTP 404", False),
        (status(302, Location="http://169.254.169.254/"), r"HTTP 302 \(redirects are not followed\)", False),
        (status(500), "HTTP 500", True),
        (status(429, Retry_After="7"), "HTTP 429", True),
        (garbage, "BadStatusLine", True),
        (silent, "no answer within 0.3 s", True),
        (dripping, "no answer within 0.3 s", True),
    ],
)
def test_bad_answers_are_reported(server: Server, answer: Any, why: str, try_again: bool) -> None:
    """Each says whether another attempt makes sense; none takes longer than its deadline or shows the secret."""
    server.then = answer
    began = time.monotonic()
    with pytest.raises(DeliveryError, match=f"127.0.0.1: {why}") as caught:
        Webhook(server.url, 0.3).post(b"{}")
    assert time.monotonic() - began < 1.2
    assert caught.value.try_again is try_again
    assert "SECRET" not in str(caught.value)
    assert len(server.received) == 1
    assert caught.value.wait == (7.0 if "429" in why else 0.0)


def test_a_refused_connection(server: Server) -> None:
    """A refused connection may be tried again."""
    server.shutdown()
    server.server_close()
    with pytest.raises(DeliveryError, match="ConnectionRefusedError") as caught:
        Webhook(server.url, 1).post(b"{}")
    assert caught.value.try_again


def test_allowing_hosts_for_a_block() -> None:
    """The block's hosts are forgotten after it, those allowed before stay."""
    allow_host("a.example.org")
    with hosts_allowed(["B.example.org", "a.example.org"]):
        assert read_url("http://b.example.org/x").named
    assert read_url("http://a.example.org/x").named
    with pytest.raises(RegistrationError, match="unencrypted"):
        read_url("http://b.example.org/x")


@pytest.mark.parametrize("host", ["https://example.org", "example.org:443", "", "a b"])
def test_an_invalid_host_is_rejected(host: str) -> None:
    """A URL or a port in the place of a host is a mistake."""
    with pytest.raises(HooklineError, match="is not a host"):
        allow_host(host)


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


def encrypted(server: Server, certificate: tuple[Path, Path], names: list[Any]) -> str:
    """Put TLS before a server, noting the names that clients ask for; returns the URL under which it is trusted."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate[1], certificate[0])
    context.sni_callback = lambda sock, name, ctx: names.append(name)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    return f"https://localhost:{server.server_port}/services/SECRETPART"


def test_tls_checks_the_certificate_against_the_name(
    server: Server, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server gets the host's name (SNI), and its certificate must be valid for it."""
    names: list[Any] = []
    url = encrypted(server, certificate, names)
    allow_host("localhost")
    with pytest.raises(DeliveryError, match="SSLCertVerificationError") as caught:
        Webhook(url, 5).post(b"{}")
    assert not caught.value.try_again
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[1]))
    Webhook(url, 5).post(b'{"text": "in private"}')
    assert server.received == [{"text": "in private"}]
    assert set(names) == {"localhost"}
    allow_host("127.0.0.1")
    with pytest.raises(DeliveryError, match="SSLCertVerificationError"):
        Webhook(url.replace("localhost", "127.0.0.1"), 5).post(b"{}")


def test_several_threads_may_post(server: Server) -> None:
    """Posts from several threads all arrive."""
    hook = Webhook(server.url, 5)
    threads = [threading.Thread(target=hook.post, args=(b"{}",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.received) == 8
