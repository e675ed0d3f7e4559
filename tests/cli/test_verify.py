"""`hookline verify` prints a table, and exits with 1 if a hook makes undeclared changes."""

import logging
import threading
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from commands import output_of

from hookline.cli import main

ALLOW = ("--allow", "my_verified_hooks", "--allow", "torch")


@pytest.fixture
def own_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a user's package with a harmless hook, one that changes the batch, one that fails, and one that warns."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_verified_hooks.py").write_text(
        "import logging\n"
        "import warnings\n"
        "import torch\n"
        "from hookline import TrainingHook, register_data, register_hook, register_model\n"
        "class Good(TrainingHook):\n"
        "    def on_step_end(self, ctx): print('SAID', ctx.loss)\n"
        "class Bad(TrainingHook):\n"
        "    def on_train_batch_start(self, step, batch):\n"
        "        if step == 2: batch[0].add_(1)\n"
        "class Breaks(TrainingHook):\n"
        "    def on_before_backward(self, step, batch):\n"
        "        if step == 2: batch[0].mul_(2)\n"
        "class Failing(TrainingHook):\n"
        "    def setup(self, trainer=None): logging.getLogger('hookline').warning('it is %s here', 'cold')\n"
        "    def on_step_end(self, ctx): raise ValueError('oh no')\n"
        "class Warning(TrainingHook):\n"
        "    def on_step_end(self, ctx):\n"
        "        warnings.warn('old')\n"
        "        logging.getLogger('hookline').info('by the way')\n"
        "class Leaks(TrainingHook):\n"
        "    def __init__(self, api_key='', hidden=''): self.api_key, self.hidden = api_key, hidden\n"
        "    def on_step_end(self):\n"
        "        warnings.warn(f'a warning with {self.api_key}')\n"
        "        logging.getLogger('hookline').warning('a log line with %s', self.api_key)\n"
        "        raise ValueError(f'401 for {self.api_key} and {self.hidden}')\n"
        "class Data:\n"
        "    def __init__(self): self.train = [(torch.ones(2, 3) * i, torch.ones(2, 1)) for i in range(8)]\n"
    )
    return tmp_path


def config(tmp_path: Path, *hooks: str) -> str:
    """Write a config with some hooks of that package, and return its path."""
    listed = "".join(f"    - {{name: my_verified_hooks.{hook}}}\n" for hook in hooks)
    (tmp_path / "run.yaml").write_text(
        "data: {name: my_verified_hooks.Data}\n"
        "model: {name: torch.nn.Linear, in_features: 3, out_features: 1}\n"
        "optimizer: {name: torch.optim.SGD, lr: 0.01}\n"
        "loss: {name: torch.nn.MSELoss}\n"
        f"hooks:\n  lifecycle:\n{listed}"
    )
    return str(tmp_path / "run.yaml")


def test_harmless_hooks_give_status_0(own_hooks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The hooks' own output is not mixed into the table."""
    printed = output_of(capsys, ["verify", config(own_hooks, "Good"), "--steps", "3", *ALLOW])
    assert "good" in printed and "changes nothing" in printed and "SAID" not in printed
    assert "OK: no hook changed training without declaring it." in printed
    assert not (own_hooks / "runs").exists()


def test_a_hook_that_writes_gives_status_1(own_hooks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table names the hook, the first step it changed, and what it wrote to."""
    assert main(["verify", config(own_hooks, "Good", "Bad"), "--steps", "3", *ALLOW]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "changes training from step 2 on, through the batch" in printed
    assert "Undeclared changes by bad." in printed


def test_a_hook_that_breaks_training_gives_status_1(own_hooks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is named with the exception, and the others are judged."""
    assert main(["verify", config(own_hooks, "Breaks", "Good"), "--steps", "3", *ALLOW]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "ended the run: RuntimeError: " in printed and "Undeclared changes by breaks." in printed
    assert "good - changes nothing" in printed


def test_a_wrong_config_prints_nothing_but_the_error(own_hooks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A config from which no trainer can be made is refused before the first line of output."""
    assert main(["verify", config(own_hooks, "Good"), "model.in_featurs=3", *ALLOW]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("hookline: error: model.in_featurs: ") and printed.err.count("\n") == 1


@pytest.mark.hooks_fail(raises=ValueError)
def test_warnings_are_printed_below_the_table(own_hooks: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Warnings of hooks do not interrupt the table, and those that a verdict contains are not repeated."""
    assert main(["verify", config(own_hooks, "Failing", "Good"), "--steps", "4", *ALLOW]) == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    above, _, below = printed.out.partition("OK: no hook changed training without declaring it.\n")
    assert "failed: ValueError: oh no" in above and "it is cold" not in above
    assert below == "warning: it is cold here\n"


def test_a_run_that_fails_does_not_hide_its_warnings(own_hooks: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Warnings from before the failure are printed, then the error."""
    path = config(own_hooks, "Failing")
    assert main(["verify", path, "trainer.debug=true", "--steps", "4", *ALLOW]) == 2
    printed = capfd.readouterr()
    assert printed.out.endswith("warning: it is cold here\n")
    who = "raised by hook 'failing' in on_step_end, step 1"
    assert printed.err == f"hookline: error: ValueError: oh no; {who} (--debug shows the traceback)\n"


def test_hooks_that_save_get_a_temporary_directory(own_hooks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The directory is removed afterwards. `--steps 0` is refused, because it would verify nothing."""
    written = Path(config(own_hooks, "Good"))
    written.write_text(written.read_text() + "    - {name: checkpoint, save_every_n_steps: 2}\n")
    assert main(["verify", str(written), "--steps", "5", *ALLOW]) == 0
    assert "checkpoint" in capsys.readouterr().out and not (own_hooks / "runs").exists()
    with pytest.raises(SystemExit):
        main(["verify", str(written), "--steps", "0"])
    assert "argument --steps: expected an integer of at least 1, got '0'" in capsys.readouterr().err


def test_a_warning_is_printed_once(own_hooks: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Warnings of Python are collected as those of Hookline are, without repetitions; information is dropped."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(["verify", config(own_hooks, "Warning"), "--steps", "4", *ALLOW]) == 0
    printed = capfd.readouterr()
    assert printed.err == "" and "by the way" not in printed.out
    assert printed.out.endswith("declaring it.\nwarning: UserWarning: old\n")


@pytest.mark.hooks_fail(raises=ValueError)
def test_tracebacks_are_printed_on_request(own_hooks: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With --debug, the exception of a failing hook is printed with its traceback."""
    for words in ([], ["--debug"]):
        assert main(["verify", config(own_hooks, "Failing"), "--steps", "4", *words, *ALLOW]) == 0
        printed = capfd.readouterr().out
        assert ("Traceback (most recent call last):" in printed) is bool(words)


@pytest.mark.parametrize(("words", "status"), [([], 0), (["trainer.debug=true"], 2), (["model.in_featurs=3"], 2)])
@pytest.mark.hooks_fail(raises=ValueError)
def test_logging_and_printing_are_restored(
    own_hooks: Path, words: list[str], status: int, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """After the command, also one that failed, logging, warnings and prints work as before."""
    shown = warnings.showwarning
    assert main(["verify", config(own_hooks, "Failing"), *words, "--steps", "2", *ALLOW]) == status
    capfd.readouterr()
    assert caplog.messages == []
    logging.getLogger("hookline").warning("seen by the handlers of the root logger")
    assert caplog.messages == ["seen by the handlers of the root logger"]
    assert warnings.showwarning is shown
    print("visible")
    assert capfd.readouterr() == ("visible\n", "")


@pytest.mark.parametrize("words", [[], ["--debug"], ["trainer.debug=true"]], ids=str)
@pytest.mark.hooks_fail(raises=ValueError)
def test_secrets_are_not_printed(
    own_hooks: Path, words: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the table nor in warnings and errors, whether they are in the config or in the environment."""
    written, known, shaped = Path(config(own_hooks)), "correct-horse-battery", "hf_abcdefghijklmnopqrstuvwxyz"
    monkeypatch.setenv("LEAKED", "stapled-to-a-post")
    leaks = f"{{name: my_verified_hooks.Leaks, api_key: {known} {shaped}, hidden: '${{env:LEAKED}}'}}"
    written.write_text(written.read_text() + f"    - {leaks}\n")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        status = main(["verify", str(written), "--steps", "4", *words, *ALLOW])
    printed = "".join(capfd.readouterr())
    assert status == (2 if "trainer.debug=true" in words else 0)
    assert "401 for" in printed and "a warning with" in printed and "a log line with" in printed
    assert not any(secret in printed for secret in (known, shaped, "stapled-to-a-post"))


def test_nothing_is_posted_to_a_webhook(own_hooks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The hook is compared as any other, and its messages are not sent."""
    received: list[bytes] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

    written = Path(config(own_hooks))
    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/services/T000/B000"
        notify = f"{{name: notify, webhook_url: '{url}', notify_on: [training_end, heartbeat], heartbeat: 1}}"
        written.write_text(written.read_text() + f"    - {notify}\n")
        assert main(["verify", str(written), "--steps", "3", "--allow-host", "127.0.0.1", *ALLOW]) == 0
        assert main(["train", str(written), "trainer.max_steps=1", "--allow-host", "127.0.0.1", *ALLOW]) == 0
        server.shutdown()
    out = capsys.readouterr().out
    assert "notify" in out and "changes nothing" in out
    assert len(received) == 2  # of the run alone: the heartbeat of its step, and its end
