"""What is printed during a run: no stream, whatever is wrong with it, ends the run."""

import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from commands import python

from hookline import EarlyStopping, Trainer, get_trainer
from hookline.demo.sampling import SampleText


class Raising:
    """A replaced standard output, as notebooks and test runners have them, that fails in every way."""

    encoding = None

    def write(self, text: str) -> int:
        raise RuntimeError("no display")

    def isatty(self) -> bool:
        raise NotImplementedError


class ClosedPipe(io.StringIO):
    """A pipe whose reader is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


class FullTerminal(io.StringIO):
    """A terminal that takes no bytes."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def closed() -> Any:
    """Return a stream that is closed."""
    stream = io.StringIO()
    stream.close()
    return stream


def make_trainer() -> Trainer:
    """Return a trainer with every hook of ours that prints."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(3)]
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    trainer = get_trainer("simple", model, data, optimizer, "cpu", loss_fn=torch.nn.functional.mse_loss)
    trainer.add_console_logging(log_every_n_batches=1)
    trainer.add_hook(EarlyStopping(monitor="train/loss", check_every_n_steps=1, verbose=True), on_error="raise")
    trainer.add_hook(SampleText(), on_error="raise")
    return trainer


@pytest.mark.parametrize("make", [closed, ClosedPipe, Raising, FullTerminal, object, lambda: None])
def test_a_broken_standard_output_does_not_end_a_run(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]) -> None:
    """The opening and closing line, progress, tables and the hooks that print lose their text, and no hook fails."""
    trainer = make_trainer()
    monkeypatch.setattr(sys, "stdout", make())
    trainer.train()
    assert trainer.status == "completed" and trainer.step == 3
    assert trainer.hook_failures == 0


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1"])
def test_characters_that_an_encoding_lacks_are_replaced(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    """The arrow of the opening line becomes '->' where the encoding has none; others are escaped, not lost."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    trainer = make_trainer()
    trainer.on("step_end", at=2, name="stops")(stop)
    trainer.train()
    text = written.getvalue().decode(encoding)
    assert f" on cpu (pass max_epochs or max_steps to train longer) -> runs/{trainer.run_id}\n" in text
    assert "\\u039b is reached), healthy: 2 steps" in text


def stop(trainer: Trainer) -> None:
    """Stop for a reason that only Unicode has."""
    trainer.request_stop("\u039b is reached")


CLOSED_STDERR = """
import sys, torch, hookline
def close_and_fail(step):
    sys.stderr.close()
    sys.stdout.close()
    raise ValueError("of the hook")
def lose_the_record(trainer):
    for lines in trainer.run_dir.iterdir(): lines.unlink()
    trainer.log("lost", 1.0)
    trainer.record.flush()
model = torch.nn.Linear(3, 1)
data = [(torch.ones(4, 3), torch.ones(4, 1))] * 3
trainer = hookline.get_trainer("simple", model, data, torch.optim.SGD(model.parameters(), 0.0), "cpu",
                               loss_fn=torch.nn.functional.mse_loss)
trainer.on("step_end")(close_and_fail)
trainer.on("step_end", at=2)(lose_the_record)
trainer.train()
sys.exit(10 * trainer.step + trainer.hook_failures if trainer.record.lost else 1)
"""


def test_warnings_without_a_standard_error_do_not_end_a_run() -> None:
    """Python's logging and its warnings raise if standard error is closed; the run continues without them."""
    assert python("-c", CLOSED_STDERR).returncode == 33
