"""The console hook: progress, validation, checkpoints, and what each hook cost."""

import contextlib
import copy
import io
import logging
import random
import re
import sys
from pathlib import Path

import pytest
from builders import make_batches, make_trainer
from run_control import PlainRun
from terminal import Terminal

from hookline import ConsoleLogHook, read_metrics

logger = logging.getLogger("hookline")


@pytest.fixture(autouse=True)
def usual_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be independent of the terminal in which the tests run."""
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.req("001-25")
def test_progress_lines() -> None:
    """Every n batches, a line with epoch, step of total, loss, mean, speed and time left."""
    out = io.StringIO()
    trainer = make_trainer(ConsoleLogHook(log_every_n_batches=2, stream=out, costs=False))
    losses: list[float] = []
    trainer.on("train_batch_end", name="losses")(lambda loss: losses.append(loss))
    trainer.train()
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"epoch 1/1  step 2/4  loss {losses[1]:.4f}  mean {sum(losses[:2]) / 2:.4f}")
    assert lines[0].endswith("left") and not lines[1].endswith("left")
    assert lines[1].startswith("epoch 1/1  step 4/4")


@pytest.mark.parametrize("every", [1, 2, 50])
def test_the_printed_loss_is_the_recorded_one(every: int) -> None:
    """With accumulation it is the mean over the step, and its line comes when the step is complete."""
    out = io.StringIO()
    hook = ConsoleLogHook(log_every_n_batches=every, stream=out, costs=False)
    trainer = make_trainer(hook, data=make_batches(8), accumulate=3, record=True)
    trainer.train()
    recorded = {row["step"]: row["train/loss"] for row in read_metrics(trainer.run_dir)}
    printed = re.findall(r"step (\d)/3  loss (\S+)", out.getvalue())
    assert printed == [(str(step), f"{loss:.4f}") for step, loss in recorded.items() if step == 3 or every < 50]


@pytest.mark.req("001-25", "001-29", "001-30")
def test_add_console_logging_registers_the_hook(capsys: pytest.CaptureFixture[str]) -> None:
    """add_console_logging() prints every 10 batches; called again it reconfigures; 'console_log' is its name."""
    trainer = make_trainer(data=make_batches(20))
    trainer.add_console_logging()
    assert trainer.hooks.get("console_log").log_every_n_batches == 10
    trainer.train()
    assert capsys.readouterr().out.count("epoch 1/1  step") == 2
    trainer.add_console_logging(log_every_n_batches=5)
    assert trainer.hooks.get("console_log").log_every_n_batches == 5
    trainer.remove_hook("console_log")
    assert "console_log" not in trainer.hooks


def test_validation_and_checkpoints_are_printed() -> None:
    """With the values of the metrics and the path of the checkpoint."""
    out = io.StringIO()
    trainer = make_trainer(data=make_batches(2), record=True, val_dataloader=make_batches(1))
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
    monkeypatch.setattr("hookline.hooks.console.hook.perf_counter", lambda: next(times))
    hook = ConsoleLogHook(stream=out)
    hook.on_train_start(run, step=0)
    state = random.getstate()
    hook.on_train_end(run, {})
    hook.close()
    assert random.getstate() == state
    assert "25.0%" in out.getvalue()


@pytest.mark.parametrize(
    ("seconds_per_step", "expected"),
    [(0.5, "2.0 steps/s  1.5 s left"), (2.0, "2.0 s/step  6.0 s left"), (1221.0, "1,221.0 s/step  1 h 01 m left")],
)
def test_speed_and_time_left(seconds_per_step: float, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow runs are in seconds per step, long ones in hours."""
    trainer, out = make_trainer(), io.StringIO()
    for module in ("hook", "times"):
        monkeypatch.setattr(f"hookline.hooks.console.{module}.perf_counter", lambda: trainer.step * seconds_per_step)
    trainer.add_hook(ConsoleLogHook(log_every_n_batches=1, stream=out, costs=False))
    trainer.train()
    assert expected in out.getvalue().splitlines()[0]


def test_a_pause_between_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that is due has no line if too little time has passed; the last step has one."""
    trainer, out = make_trainer(data=make_batches(12)), io.StringIO()
    for module in ("hook", "times"):
        monkeypatch.setattr(f"hookline.hooks.console.{module}.perf_counter", lambda: trainer.step * 10.0)
    trainer.add_hook(ConsoleLogHook(log_every_n_batches=2, stream=out, costs=False, pause=30.0))
    trainer.train()
    assert [line.split("  ")[1] for line in out.getvalue().splitlines()] == ["step 4/12", "step 8/12", "step 12/12"]


def test_validations_do_not_count_in_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does what hooks do at their end; the time left includes them, because there will be more of them."""
    now, out = [0.0], io.StringIO()
    for module in ("hook", "times"):
        monkeypatch.setattr(f"hookline.hooks.console.{module}.perf_counter", lambda: now[0])
    trainer = make_trainer(data=make_batches(8), val_dataloader=make_batches(1), validate_every=2, sanity_batches=0)
    trainer.on("after_backward", name="half a second")(lambda: now.__setitem__(0, now[0] + 0.5))
    trainer.on("validation_end", name="ten seconds")(lambda: now.__setitem__(0, now[0] + 10.0))
    trainer.add_hook(ConsoleLogHook(log_every_n_batches=1, stream=out, costs=False))
    trainer.train()
    lines = [line for line in out.getvalue().splitlines() if line.startswith("epoch")]
    assert ["2.0 steps/s" in line for line in lines] == [True] * 8
    assert lines[2].endswith("19.2 s left")  # 11.5 seconds for three steps, and five more steps


def test_it_prints_to_the_current_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    """Also after a run whose output was redirected; a copy of the hook works the same."""
    trainer = make_trainer(data=make_batches(2), val_dataloader=make_batches(1))
    trainer.add_hook(copy.deepcopy(ConsoleLogHook(log_every_n_batches=1, costs=False)))
    with io.StringIO() as caught, contextlib.redirect_stdout(caught):
        trainer.train()
        assert "step 2/2" in caught.getvalue()
    trainer.validate()
    assert "validation  val/loss" in capsys.readouterr().out


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """No escape sequence, and nothing is rewritten, where TERM says that the terminal cannot do that."""
    terminal = at_terminal(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    trainer = make_trainer(data=make_batches(2))
    trainer.add_console_logging(log_every_n_batches=1)
    trainer.train()
    lines = terminal.getvalue().splitlines()
    assert lines[0].startswith("epoch 1/1  step 1/2") and lines[1].startswith("epoch 1/1  step 2/2")
    assert "\x1b" not in terminal.getvalue() and "\r" not in terminal.getvalue()


def at_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make standard output a terminal; standard error is not one."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    return stream


def test_a_process_without_standard_streams_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under pythonw, for example, both are None."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    hook = ConsoleLogHook()
    hook.on_train_start(PlainRun(), step=0)
    hook.close()
    assert sys.stdout is None
