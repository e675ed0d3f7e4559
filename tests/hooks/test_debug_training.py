"""The hook opens the debugger at a terminal, writes a crash folder elsewhere, and prints shapes."""

import bdb
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hookline import DebugHook, Trainer, get_trainer
from hookline.hooks import debug_training


def make_trainer(hook: DebugHook, bad: int | None = 1, sizes: tuple[int, ...] = (4, 4, 4)) -> Trainer:
    """Make a trainer with three batches, one of which may contain a NaN."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    batches = [(torch.randn(size, 3), torch.randn(size, 1)) for size in sizes]
    if bad is not None:
        batches[bad][0][0, 0] = float("nan")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = get_trainer("simple", model, batches, optimizer, "cpu", loss_fn=nn.functional.mse_loss, console=False)
    trainer.add_hook(hook)
    return trainer


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Pretend to be at a terminal, and store what the debugger would show."""
    shown: list[tuple[Any, ...]] = []
    monkeypatch.setattr(debug_training, "at_terminal", lambda: True)
    monkeypatch.setattr(debug_training, "_open_debugger", lambda *frame: shown.append(frame))
    return shown


@pytest.mark.req("002-78", "002-06")
def test_without_a_terminal_it_writes_a_dump() -> None:
    """Without a terminal no debugger is opened, and the run continues."""
    hook = DebugHook(break_on_nan=True)
    trainer = make_trainer(hook)
    assert trainer.train()["status"] == "completed"
    assert trainer.step == 3
    assert hook.crash is not None and (hook.crash / "crash.json").is_file()
    assert hook.autopsy is not None and hook.autopsy.batch == ("batch[0]",)


@pytest.mark.req("002-78")
def test_at_a_terminal_it_opens_the_debugger(terminal: list[tuple[Any, ...]]) -> None:
    """With trainer, batch, autopsy and reason as arguments, before the optimizer step; nothing is written."""
    hook = DebugHook()
    trainer = make_trainer(hook)
    trainer.train()
    shown, batch, autopsy, reason = terminal[0]
    assert len(terminal) == 1 and shown is trainer and autopsy is hook.autopsy
    assert torch.isnan(batch[0]).any() and reason == "loss nan"
    assert hook.crash is None and not list(Path("runs").rglob("crash.json"))


def test_quitting_the_debugger_ends_the_run(terminal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C would, and not as a failure of the hook."""

    def quit_it(*frame: Any) -> None:
        raise bdb.BdbQuit

    monkeypatch.setattr(debug_training, "_open_debugger", quit_it)
    trainer = make_trainer(DebugHook())
    with pytest.raises(KeyboardInterrupt, match="quit in the debugger at loss nan, step 2"):
        trainer.train()
    assert trainer.step == 2


def test_without_break_it_only_reports(caplog: pytest.LogCaptureFixture, terminal: list[Any]) -> None:
    """One warning with what was found; neither debugger nor dump."""
    hook = DebugHook(break_on_nan=False)
    make_trainer(hook).train()
    assert hook.crash is None and terminal == []
    assert any("step 2: loss nan; the batch itself is not finite in batch[0]" in line for line in caplog.messages)


@pytest.mark.req("002-78")
def test_shapes_are_printed_when_they_change(capsys: pytest.CaptureFixture[str]) -> None:
    """Every tensor of the batch with its place, once for as long as it stays the same."""
    make_trainer(DebugHook(log_shapes=True), bad=None, sizes=(4, 4, 2)).train()
    assert capsys.readouterr().out.splitlines() == [
        "from batch 0: batch[0]: float32 (4, 3) on cpu; batch[1]: float32 (4, 1) on cpu",
        "from batch 2: batch[0]: float32 (2, 3) on cpu; batch[1]: float32 (2, 1) on cpu",
    ]
