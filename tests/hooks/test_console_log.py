"""The console hook: progress, validation, checkpoints, and what each hook cost."""

import contextlib
import copy
import io
import logging
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_control import PlainRun

from hookline import ConsoleLogHook, Trainer, get_trainer

logger = logging.getLogger("hookline")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def usual_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be independent of the terminal in which the tests run."""
    monkeypatch.setenv("TERM", "xterm")


def make_trainer(batches: int = 4, **options: Any) -> Trainer:
    """A trainer whose own lines are off."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(batches)]
    options = {"record": False, "console": False, "loss_fn": torch.nn.functional.mse_loss, **options}
    return get_trainer("simple", model, data, torch.optim.SGD(model.parameters(), 0.1), "cpu", **options)


@pytest.mark.req("001-25")
def test_progress_lines() -> None:
    """Every n batches, a line with epoch, step of total, loss, mean, speed and time left."""
    out = io.StringIO()
    trainer = make_trainer()
    trainer.add_hook(ConsoleLogHook(log_every_n_batches=2, stream=out, costs=False))
    losses: list[float] = []
    trainer.on("train_batch_end", name="losses")(lambda loss: losses.append(loss))
    trainer.train()
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"epoch 0  step 2/4  loss {losses[1]:.4f} (so far {sum(losses[:2]) / 2:.4f})")
    assert lines[0].endswith("left")
    assert lines[1].startswith("epoch 0  step 4/4")


@pytest.mark.req("001-25", "001-29", "001-30")
def test_add_console_logging_registers_the_hook(capsys: pytest.CaptureFixture[str]) -> None:
    """add_console_logging() prints every 10 batches; called again it reconfigures; 'console_log' is its name."""
    trainer = make_trainer(20)
    trainer.add_console_logging()
    assert trainer.hooks.get("console_log").log_every_n_batches == 10
    trainer.train()
    assert capsys.readouterr().out.count("epoch 0  step") == 2
    trainer.add_console_logging(log_every_n_batches=5)
    assert trainer.hooks.get("console_log").log_every_n_batches == 5
    trainer.remove_hook("console_log")
    assert "console_log" not in trainer.hooks


def test_a_terminal_line_is_rewritten_in_place() -> None:
    """Progress overwrites itself; other output starts on a new line."""
    out = Terminal()
    trainer = make_trainer(2, val_dataloader=[(torch.randn(2, 3), torch.randn(2, 1))])
    trainer.add_hook(ConsoleLogHook(log_every_n_batches=1, stream=out, costs=False))
    trainer.train()
    text = out.getvalue()
    assert text.count("\r\x1b[K") == 2
    assert "\nstep 2  validation  val/loss " in text
    assert text.endswith("\n")


def test_a_warning_starts_on_a_new_line() -> None:
    """At a terminal the progress line is ended first; when the run is over the log is left alone."""
    out = Terminal()
    handler = logging.StreamHandler(out)
    logger.addHandler(handler)
    trainer = make_trainer(2)
    trainer.add_hook(ConsoleLogHook(log_every_n_batches=1, stream=out, costs=False))
    trainer.on("step_end", name="warns")(lambda step: logger.warning("step %d is odd", step) if step == 1 else None)
    trainer.on("train_end", name="fails")(lambda step: 1 / 0)
    try:
        trainer.train()
    finally:
        logger.removeHandler(handler)
    assert "left\nstep 1 is odd\n\r\x1b[K" in out.getvalue()
    assert "left\nhook 'fails', on_train_end" in out.getvalue()
    assert logger.filters == []


def test_other_output_starts_on_a_new_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """On both streams, which are restored afterwards."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    trainer = make_trainer(3)
    trainer.add_hook(ConsoleLogHook(log_every_n_batches=1, costs=False))
    trainer.on("step_end", name="talks")(lambda step: print("step", step, file=sys.stderr if step == 2 else None))
    trainer.train()
    for step in (1, 2, 3):
        assert f"left\nstep {step}\n" in terminal.getvalue()
    assert sys.stdout is terminal and sys.stderr is terminal


def test_a_crash_leaves_the_terminal_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The progress line is ended, and the streams are restored."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    trainer = make_trainer(3, loss_fn=lambda prediction, target: losses.pop())
    losses = [trainer.model(torch.ones(4, 3)).mean()]
    trainer.add_hook(ConsoleLogHook(log_every_n_batches=1, costs=False))
    with pytest.raises(IndexError):
        trainer.train()
    assert terminal.getvalue().endswith("left\n")
    assert sys.stdout is terminal


def test_validation_and_checkpoints_are_printed() -> None:
    """With the values of the metrics and the path of the checkpoint."""
    out = io.StringIO()
    trainer = make_trainer(2, record=True, val_dataloader=[(torch.randn(2, 3), torch.randn(2, 1))])
    trainer.add_hook(ConsoleLogHook(log_every_n_batches=50, stream=out))
    trainer.add_checkpointing()
    trainer.on("validation_end", name="adds")(
        lambda metrics: metrics.update({"val/text": "not printed", "val/accuracy": 0.5})
    )
    trainer.train()
    text = out.getvalue()
    assert "step 2  validation  val/loss " in text and "val/accuracy 0.5000" in text and "not printed" not in text
    assert f"saved {trainer.checkpoint_dir.relative_to(Path.cwd())}" in text
    assert "What each hook cost" in text and "checkpoint" in text


def test_printing_costs_restores_the_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich draws random numbers; the generator's state is restored."""
    out, run = io.StringIO(), PlainRun()
    rows = [{"hook": "a", "kind": "lifecycle", "calls": 3, "seconds": 0.25}]
    monkeypatch.setattr(run.hooks, "costs", lambda: rows)
    times = iter([10.0, 10.0, 11.0])
    monkeypatch.setattr("hookline.hooks.console_log.monotonic", lambda: next(times))
    hook = ConsoleLogHook(stream=out)
    hook.on_train_start(step=0)
    state = random.getstate()
    hook.on_train_end(run)
    hook.close()
    assert random.getstate() == state
    assert "25.0%" in out.getvalue()


@pytest.mark.parametrize(
    ("seconds_per_step", "expected"),
    [(0.5, "2.0 steps/s  0:02 left"), (2.0, "2.0 s/step  0:06 left"), (1221.0, "1221.0 s/step  1:01:03 left")],
)
def test_speed_and_time_left(seconds_per_step: float, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow runs are in seconds per step, long ones in hours."""
    trainer, out = make_trainer(4), io.StringIO()
    monkeypatch.setattr("hookline.hooks.console_log.monotonic", lambda: trainer.step * seconds_per_step)
    trainer.add_hook(ConsoleLogHook(log_every_n_batches=1, stream=out, costs=False))
    trainer.train()
    assert expected in out.getvalue().splitlines()[0]


def test_it_prints_to_the_current_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    """Also after a run whose output was redirected; a copy of the hook works the same."""
    trainer = make_trainer(2, val_dataloader=[(torch.randn(2, 3), torch.randn(2, 1))])
    trainer.add_hook(copy.deepcopy(ConsoleLogHook(log_every_n_batches=1, costs=False)))
    with io.StringIO() as caught, contextlib.redirect_stdout(caught):
        trainer.train()
        assert "step 2/2" in caught.getvalue()
    trainer.validate()
    assert "validation  val/loss" in capsys.readouterr().out


# ---- the terminal ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (200, "epoch 12  step 123456/200000  loss 12.3456 (so far 12.3456)  100.0 steps/s  12:45 left"),
        (80, "epoch 12  step 123456/200000  loss 12.3456 (so far 12.3456)  12:45 left"),
        (70, "step 123456/200000  loss 12.3456 (so far 12.3456)  12:45 left"),
        (60, "step 123456/200000  loss 12.3456  12:45 left"),
        (40, "step 123456/200000  loss 12.3456"),
        (20, "step 123456/200000 "),
    ],
)
def test_the_progress_line_fits_the_terminal(columns: int, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit is left out as a whole, the least important first."""
    terminal, run = at_terminal(monkeypatch), PlainRun()
    run.total_steps = 200_000
    monkeypatch.setenv("COLUMNS", str(columns))
    times = iter([0.0, 0.0, 1234.56])
    monkeypatch.setattr("hookline.hooks.console_log.monotonic", lambda: next(times))
    hook = ConsoleLogHook()
    hook.on_train_start(step=0)
    hook.on_train_batch_end(run, 12, 123_456, {"latest_loss": 12.3456, "avg_loss": 12.3456})
    assert terminal.getvalue() == f"\r\x1b[K{shown}"
    hook.close()


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """No escape sequence, and nothing is rewritten, where TERM says that the terminal cannot do that."""
    terminal = at_terminal(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    trainer = make_trainer(2)
    trainer.add_console_logging(log_every_n_batches=1)
    trainer.train()
    lines = terminal.getvalue().splitlines()
    assert lines[0].startswith("epoch 0  step 1/2") and lines[1].startswith("epoch 0  step 2/2")
    assert "\x1b" not in terminal.getvalue() and "\r" not in terminal.getvalue()


def at_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make standard output a terminal; standard error is not one."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    return stream


def started(*hooks: ConsoleLogHook) -> None:
    """Start hooks, of which the last prints a progress line."""
    for hook in hooks:
        hook.on_train_start(step=0)
    progress(hooks[-1])


def progress(hook: ConsoleLogHook) -> None:
    """Let a hook print its progress line."""
    hook.on_train_batch_end(PlainRun(), 0, 1, {"latest_loss": 1.0, "avg_loss": 1.0})


@pytest.mark.parametrize("write", ["write", "writelines"])
def test_the_line_is_ended_before_anything_is_written(write: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By either method of the stream, once; a stream that is not a terminal is left alone."""
    terminal, hook = at_terminal(monkeypatch), ConsoleLogHook()
    error = sys.stderr
    started(hook)
    print("elsewhere", file=sys.stderr)
    assert terminal.getvalue().endswith("left") and sys.stderr is error
    getattr(sys.stdout, write)(["one", "two"] if write == "writelines" else "one")
    sys.stdout.write("three")
    assert "left\none" in terminal.getvalue() and terminal.getvalue().count("\n") == 1
    assert sys.stdout.isatty()
    hook.close()
    assert sys.stdout is terminal


def test_a_stream_that_was_replaced_since_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the hook was started twice; closing restores only what the hook replaced."""
    terminal, hook = at_terminal(monkeypatch), ConsoleLogHook()
    started(hook, hook)
    theirs = sys.stdout = io.StringIO()
    hook.close()
    assert sys.stdout is theirs
    sys.stdout = terminal
    started(hook, hook)
    hook.close()
    assert sys.stdout is terminal


def test_a_process_without_standard_streams_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under pythonw, for example, both are None."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    hook = ConsoleLogHook()
    hook.on_train_start(step=0)
    hook.close()
    assert sys.stdout is None


def test_a_custom_stream_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `write` may return None, and the other stream may be closed."""

    class Tee(Terminal):
        def write(self, text: str) -> None:  # type: ignore[override]
            super().write(text)

    tee, closed, hook = Tee(), io.StringIO(), ConsoleLogHook()
    closed.close()
    monkeypatch.setattr(sys, "stdout", tee)
    monkeypatch.setattr(sys, "stderr", closed)
    started(hook)
    print("printed")
    hook.close()
    assert tee.getvalue().endswith("left\nprinted\n") and sys.stdout is tee and sys.stderr is closed


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_runs_that_overlap_may_end_in_any_order(order: Iterable[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ends its own line before others print, and the stream is restored when the last run has ended."""
    terminal, hooks = at_terminal(monkeypatch), [ConsoleLogHook() for _ in range(3)]
    for hook in hooks:
        started(hook)
    for number in order:
        assert sys.stdout is not terminal
        print("another line")
        assert terminal.getvalue().endswith("\nanother line\n")
        progress(hooks[number])
        hooks[number].close()
    assert sys.stdout is terminal
    lines = terminal.getvalue().split("\n")
    assert len([line for line in lines if line.startswith("\r\x1b[Kepoch 0") and line.count("\r") == 1]) == 6
    assert lines.count("another line") == 3
