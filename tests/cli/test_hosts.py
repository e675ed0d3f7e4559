"""`--allow-host` opens the way to a host for one command."""

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from small_config import config_with

from hookline.cli import main
from hookline.cli.hosts import allowed_hosts
from hookline.errors import RegistrationError
from hookline.hooks import webhook
from hookline.hooks.webhook import read_url

CONFIG = config_with('{name: notify, webhook_url: "${env:HOOK_URL}", notify_on: training_end}')


@pytest.fixture(autouse=True)
def own_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was allowed before is not allowed here."""
    monkeypatch.setattr(webhook, "_allowed", set())


def test_hosts_are_allowed_for_one_command() -> None:
    """Inside the block, and no longer; without the option nothing is touched."""
    with allowed_hosts(argparse.Namespace(allow_hosts=["10.0.0.1"])):
        assert read_url("http://10.0.0.1/x").named
    with allowed_hosts(argparse.Namespace()), pytest.raises(RegistrationError, match="unencrypted"):
        read_url("http://10.0.0.1/x")


def test_a_command_reaches_a_local_server_only_when_told_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused with the option's name; with it, the message arrives and the secret is not printed."""
    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    monkeypatch.setenv("HOOK_URL", f"http://127.0.0.1:{server.server_port}/SECRETPART")
    Path("run.yaml").write_text(CONFIG, encoding="utf-8")
    try:
        assert main(["train", "run.yaml"]) == 2
        refused = capsys.readouterr()
        assert "--allow-host 127.0.0.1" in refused.err
        assert main(["train", "run.yaml", "--allow-host", "127.0.0.1"]) == 0
        printed = capsys.readouterr()
    finally:
        server.shutdown()
        server.server_close()
    assert len(received) == 1 and "ended: completed after step 2" in received[0]["text"]
    assert "SECRETPART" not in refused.err + printed.out + printed.err
