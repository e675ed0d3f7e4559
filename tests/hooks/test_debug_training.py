"""The hook opens the debugger at a terminal, writes a crash folder elsewhere, and prints shapes."""

import bdb
import sys
from pathlib import Path
from typing import Any

import builders
import pytest
import torch
from builders import make_batches, train
from run_control import PlainRun
from terminal import Terminal

from hookline import DebugHook, SimpleTrainer


def make_trainer(hook: DebugHook) -> SimpleTrainer:
    """Make a trainer with three batches, the second of which contains a NaN."""
    batches = make_batches(3)
    batches[1][0][0, 0] = float("nan")
    return builders.make_trainer(hook, data=batches, record=True)


def at_terminal(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Pretend to be at a terminal, and store the local variables that the debugger would show."""
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(sys, "breakpointhook", lambda: shown.append(dict(sys._getframe(1).f_locals)))
    return shown


@pytest.mark.req("002-78", "002-06")
def test_without_a_terminal_it_writes_a_dump() -> None:
    """Without a terminal no debugger is opened, and the run continues."""
    trainer = make_trainer(hook := DebugHook(break_on_nan=True))
    assert trainer.train()["status"] == "completed"
    assert trainer.step == 3
    assert hook.crash is not None and (hook.crash / "crash.json").is_file()
    assert hook.autopsy is not None and hook.autopsy.batch == ("batch[0]",)


@pytest.mark.req("002-78")
def test_at_a_terminal_it_opens_the_debugger(monkeypatch: pytest.MonkeyPatch) -> None:
    """With trainer, batch, autopsy and reason as local variables, before the optimizer step; nothing is written."""
    terminal, hook = at_terminal(monkeypatch), DebugHook()
    trainer = make_trainer(hook)
    trainer.train()
    [shown] = terminal
    assert shown["trainer"] is trainer and shown["autopsy"] is hook.autopsy
    assert torch.isnan(shown["batch"][0]).any() and shown["reason"] == "loss nan"
    assert hook.crash is None and not list(Path("runs").rglob("crash.json"))


def test_quitting_the_debugger_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C would, and not as a failure of the hook."""

    def quit_it() -> None:
        raise bdb.BdbQuit

    at_terminal(monkeypatch)
    monkeypatch.setattr(sys, "breakpointhook", quit_it)
    trainer = make_trainer(DebugHook())
    with pytest.raises(
        KeyboardInterrupt, match="quit in the debugger in hook 'debug_training', on_gradients_ready, step 2"
    ):
        trainer.train()
    assert trainer.step == 2


def test_without_break_it_only_reports(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning with what was found; neither debugger nor dump."""
    terminal, hook = at_terminal(monkeypatch), DebugHook(break_on_nan=False)
    make_trainer(hook).train()
    assert hook.crash is None and terminal == []
    assert any("step 2: loss nan; the batch itself is not finite in batch[0]" in line for line in caplog.messages)


@pytest.mark.req("002-78")
def test_shapes_are_printed_when_they_change(capsys: pytest.CaptureFixture[str]) -> None:
    """Every tensor of the batch with its place, once for as long as it stays the same."""
    train(DebugHook(log_shapes=True), data=[*make_batches(2), *make_batches(1, size=2)])
    assert capsys.readouterr().out.splitlines() == [
        "from batch 0: batch[0]: float32 (4, 3) on cpu; batch[1]: float32 (4, 1) on cpu",
        "from batch 2: batch[0]: float32 (2, 3) on cpu; batch[1]: float32 (2, 1) on cpu",
    ]


def test_tensors_of_a_nested_batch_are_named_by_their_keys(capsys: pytest.CaptureFixture[str]) -> None:
    """Values that are not tensors are left out."""
    run, hook = PlainRun(), DebugHook(log_shapes=True)
    for index, batch in enumerate(({"a": (torch.ones(1), [torch.ones(2)]), "b": "text", "c": 3}, torch.ones(3))):
        hook.on_train_batch_start(run, batch, index, "train")
    assert capsys.readouterr().out.splitlines() == [
        "from batch 0: batch['a'][0]: float32 (1,) on cpu; batch['a'][1][0]: float32 (2,) on cpu",
        "from batch 1: batch: float32 (3,) on cpu",
    ]
