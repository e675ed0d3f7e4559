"""A real HTTP server on this machine, well-behaved or not."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from run_control import PlainRun

import hookline as hl
from hookline.hooks.webhook import hosts_allowed

Answer = Callable[[BaseHTTPRequestHandler], None]


def ok(request: BaseHTTPRequestHandler) -> None:
    """Accept the message."""
    request.send_response(200)
    request.end_headers()


def status(code: int, **headers: str) -> Answer:
    """Answer with a status."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(code)
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()

    return answer


def silent(request: BaseHTTPRequestHandler) -> None:
    """Do not answer before the test ends."""
    request.server.ended.wait()  # type: ignore[attr-defined]


def dripping(request: BaseHTTPRequestHandler) -> None:
    """Send single bytes, each just before a socket's timeout."""
    while True:
        try:
            request.wfile.write(b"H")
            request.wfile.flush()
        except OSError:  # the client has hung up
            return
        time.sleep(0.05)


def garbage(request: BaseHTTPRequestHandler) -> None:
    """Answer with bytes that are not HTTP."""
    request.wfile.write(b"\x00\xff\x00 hello\r\n\r\n")


class Server(ThreadingHTTPServer):
    """Stores every message; answers come from `answers`, then from `then`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.received: list[dict[str, Any]] = []
        self.requests: list[BaseHTTPRequestHandler] = []
        self.answers: list[Answer] = []
        self.then: Answer = ok
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/services/T000/SECRETPART"

    @property
    def texts(self) -> list[str]:
        return [message["text"] for message in self.received]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that hung up."""


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append(self)
        self.server.received.append(json.loads(body))
        answer = self.server.answers.pop(0) if self.server.answers else self.server.then
        answer(self)

    def log_message(self, *arguments: Any) -> None:
        pass


def send(hook: hl.NotifyHook, *texts: str) -> list[dict[str, Any]]:
    """Send messages as in a run, wait for them, and return what the hook wrote into the record."""
    run = PlainRun()
    hook.on_train_start(run)
    for text in texts:
        hook.tell(text)
    hook.close()
    return run.notes


@pytest.fixture(autouse=True)
def own_hosts() -> Iterator[None]:
    """Forget the hosts that a test allows."""
    with hosts_allowed([]):
        yield


@pytest.fixture
def server() -> Iterator[Server]:
    """Start a server on 127.0.0.1, which webhooks are allowed to use."""
    made = Server()
    hl.allow_host("127.0.0.1")
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield made
    made.ended.set()
    made.shutdown()
    made.server_close()
    thread.join()
