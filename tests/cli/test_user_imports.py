"""What only the command line can allow: `--import`, `--allow` and `--allow-host`."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from commands import Captured, line_of_error, output_of
from small_config import config_with

from hookline.cli import main
from hookline.hooks import webhook

PARTS = """
from types import SimpleNamespace
import torch
from hookline import TrainingHook, register_data, register_hook, register_model

@register_model("line")
def line(width=4):
    return torch.nn.Linear(width, 1)

@register_data("noise")
def noise(batches=3):
    return SimpleNamespace(train=[(torch.randn(2, 4), torch.randn(2, 1)) for _ in range(batches)])

@register_hook("shout")
class Shout(TrainingHook):
    \"\"\"Shouts.\"\"\"
    def on_train_end(self, step):
        print("OVER AFTER", step)
"""
CONFIG = """
model: line
data: {name: noise, batches: 2}
loss: mse
optimizer: {name: sgd, lr: 0.1}
trainer: {record: false, console: false}
hooks: {lifecycle: [shout]}
"""


@pytest.fixture(autouse=True)
def own_parts() -> Iterator[None]:
    """Write a module and a config; the module is imported anew in each test."""
    Path("ownparts.py").write_text(PARTS, encoding="utf-8")
    Path("own.yaml").write_text(CONFIG, encoding="utf-8")
    yield
    for module in ("ownparts", "broken"):
        sys.modules.pop(module, None)


def test_a_config_names_what_an_imported_module_registers(capsys: Captured) -> None:
    """With --import, a config names the user's model, data and hook like built-ins."""
    assert "OVER AFTER 2" in output_of(capsys, ["train", "own.yaml", "--import", "ownparts"])


def test_without_the_import_the_error_says_how(capsys: Captured) -> None:
    """The error for a name that is not registered suggests --import, for components and for hooks."""
    assert "there is no data named 'noise'" in (error := line_of_error(capsys, "train", "own.yaml", "hooks={}"))
    assert "--import MODULE" in error
    words = ["train", "hooks.lifecycle=[shout]"]
    assert "there is no hook named 'shout'" in (error := line_of_error(capsys, *words))
    assert "--import MODULE" in error


def test_explain_and_hooks_import_too(capsys: Captured) -> None:
    """`explain` reads such a config, and `hooks` lists what the module registers."""
    assert "1. shout" in output_of(capsys, ["explain", "own.yaml", "--import", "ownparts", "--event", "train_end"])
    assert "shout  lifecycle, registered\n    Shouts." in output_of(capsys, ["hooks", "--import", "ownparts"])


def test_a_config_file_cannot_import(capsys: Captured) -> None:
    """A config has no key for imports."""
    assert "imports: unknown key" in line_of_error(capsys, "train", "own.yaml", "imports=[ownparts]")
    assert "ownparts" not in sys.modules


def test_the_current_directory_is_searched_first_during_the_command(capsys: Captured) -> None:
    """The current directory is first on sys.path during the command, and removed afterwards, also after a failure."""
    Path("shows_path.py").write_text("import sys\nprint(*sys.path, sep='\\n')\n", encoding="utf-8")
    before = list(sys.path)
    try:
        assert main(["hooks", "--import", "shows_path"]) == 0
        assert capsys.readouterr().out.splitlines()[: 1 + len(before)] == [str(Path.cwd()), *before]
    finally:
        sys.modules.pop("shows_path", None)
    assert sys.path == before
    line_of_error(capsys, "hooks", "--import", "nothing_there")
    line_of_error(capsys, "train", "own.yaml", "--allow", "ownparts")
    assert sys.path == before


def test_allow_finds_packages_of_the_current_directory(capsys: Captured) -> None:
    """A dotted path under an allowed prefix is found beside the config; an error says where was searched."""
    words = ["train", "own.yaml", "data=ownparts.noise", "model.name=ownparts.line", "hooks={}"]
    assert "not allowed" in line_of_error(capsys, *words)
    output_of(capsys, [*words, "--allow", "ownparts"])
    missing = line_of_error(capsys, *words, "loss=elsewhere.Loss", "--allow", "ownparts", "--allow", "elsewhere")
    assert "loss.name: 'elsewhere.Loss': cannot import 'elsewhere' (No module named 'elsewhere'); " in missing
    assert f"looks in the current directory ({Path.cwd()})" in missing


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("not_there", "cannot import 'not_there': ModuleNotFoundError: No module named 'not_there'; a `hookline` "),
        ("./parts/mine.py", "not a module name; write --import parts.mine"),
        ("ownparts.py", "not a module name; write --import ownparts"),
        ("a b", "not a module name; write --import mypackage.mymodule"),
        ("broken", "cannot import 'broken': NameError: name 'nonsense' is not defined"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(capsys: Captured, word: str, expected: str) -> None:
    """The error names the module, the reason and a remedy."""
    Path("broken.py").write_text("nonsense\n", encoding="utf-8")
    assert f"--import {word}: {expected}" in line_of_error(capsys, "train", "own.yaml", "--import", word)


def test_a_module_that_lacks_a_package_is_not_said_to_be_missing(capsys: Captured) -> None:
    """If the module exists and what it imports does not, the error does not explain where modules are searched."""
    Path("broken.py").write_text("import not_installed_here\n", encoding="utf-8")
    error = line_of_error(capsys, "train", "own.yaml", "--import", "broken")
    assert "No module named 'not_installed_here'" in error
    assert "looks in" not in error


# ---- --allow-host --------------------------------------------------------------------------------------------------

NOTIFYING = config_with('{name: notify, webhook_url: "${env:HOOK_URL}", notify_on: training_end}')


@pytest.fixture
def no_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove all hosts that were allowed before."""
    monkeypatch.setattr(webhook, "_allowed", set())


def test_a_command_reaches_a_local_server_only_if_allowed(
    no_hosts: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --allow-host, the error names the option; with it, the message arrives. It counts for one command."""
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
    Path("run.yaml").write_text(NOTIFYING, encoding="utf-8")
    try:
        assert main(["train", "run.yaml"]) == 2
        refused = capsys.readouterr()
        assert "--allow-host 127.0.0.1" in refused.err
        assert main(["train", "run.yaml", "--allow-host", "127.0.0.1"]) == 0
        printed = capsys.readouterr()
        assert main(["train", "run.yaml"]) == 2
    finally:
        server.shutdown()
        server.server_close()
    assert len(received) == 1 and "ended: completed after step 2" in received[0]["text"]
    assert "SECRETPART" not in refused.err + printed.out + printed.err
