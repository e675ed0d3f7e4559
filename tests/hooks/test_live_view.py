"""The live view of a run at a terminal and in a notebook."""

import io
import logging
import os
import pty
import random
import re
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import builders
import pytest
import torch
from builders import make_batches
from run_control import PlainRun, train
from terminal import Terminal, run_at_terminal

import hookline
from hookline import ConsoleLogHook, EarlyStopping, Trainer, TrainingHook
from hookline.hooks.console.times import StepReport
from hookline.hooks.console.view import LiveView

LABELS = ["epoch", "run", "loss", "speed"]
WITH_VALIDATION = ["epoch", "run", "loss", "validation", "speed"]


@pytest.fixture(autouse=True)
def usual_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns, drawn after every batch, whatever the clock says."""
    for name in ("NO_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "40"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("hookline.hooks.console.view.TERMINAL_SECONDS", 0.0)
    monkeypatch.setattr("hookline.hooks.console.view.NOTEBOOK_SECONDS", 0.0)


def at_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make standard output and standard error one terminal; pytest sets them before each test."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


make_trainer = partial(builders.make_trainer, console=True, max_epochs=1, val_dataloader=make_batches(2))


class Looks(TrainingHook):
    """Keeps the screen as it is after some steps, when the live view has been drawn."""

    def __init__(self, terminal: Terminal, columns: int = 80) -> None:
        self.terminal, self.columns, self.screens = terminal, columns, {}

    def on_step_end(self, step: int) -> None:
        self.screens[step] = self.terminal.screen(self.columns)


def region(screen: list[str]) -> list[str]:
    """The lines of the live view on a screen."""
    first = max(index for index, line in enumerate(screen) if line.startswith("epoch"))
    return screen[first:]


# ---- what it shows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_view_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar for the epoch and for the run, then loss, validation and speed; no line is wrapped or cut in a word."""
    terminal = at_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", str(columns))
    looks = Looks(terminal, columns)
    trainer = make_trainer(data=make_batches(1200), max_epochs=3, validate_every=20, max_steps=50, hooks=[looks])
    trainer.train()
    shown = region(looks.screens[40])
    assert [line.split()[0] for line in shown[:5]] == WITH_VALIDATION and len(shown) <= 6
    assert re.match("epoch 1/3   [━╸]+─+  40/1,200", shown[0]) and "3%" in shown[0]
    assert shown[1].startswith("run         ━━") and re.search(r"39/50( steps)? +78% +\d\.\d s left", shown[1])
    # Losses come with the record, which is written by time, too: on a busy machine they are those of an earlier step.
    assert re.match(r"loss        (-|\d\.\d{4}( at step \d+)?)  mean (-|\d\.\d{4})  lr 0\.1$", shown[2])
    assert re.match(r"validation  val/loss \d\.\d{4}  best \d\.\d{4} at step 20$", shown[3])
    assert shown[4].endswith("so far") and "steps/s" in shown[4]
    assert all(len(line) < columns for line in shown)
    assert (trainer.record.run_id in shown[1]) == (columns == 200)
    assert len(shown[1]) > columns - 5  # the bars take the room that is left


def test_the_number_of_the_epoch_is_shown_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many digits it has; the other lines have the same column."""
    terminal = at_terminal(monkeypatch)
    run, view = PlainRun(), LiveView(terminal)
    run.progress.epoch, run.total_epochs = 9, 1000
    view.start(run, 0.0)
    view.draw(run, 1.0)
    shown = region(terminal.screen())
    assert shown[0].startswith("epoch 10/1,000 ─") and shown[1].startswith("run            ─")
    assert shown[2].startswith("loss           -  mean")
    view.place.close()


@pytest.mark.parametrize("first", [0, 80], ids=["all the time", "disabled at first"])
def test_the_time_left_of_an_epoch_with_accumulation(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the same after each micro-batch of a step, and that of the run if the epoch is its last."""
    terminal = at_terminal(monkeypatch)
    run, view = PlainRun(), LiveView(terminal)
    run.total_steps, run.epoch_batches = 100, 400
    view.start(run, 0.0)
    left = []
    for batch in range(first, 200):
        view.end_batch(batch)
        if batch in (first + 4, 160, 161, 162, 163):
            view.draw(run, batch / 4)  # a step takes a second
            left += re.findall(r"% +(\S.*) left", region(terminal.screen())[0])
        if batch % 4 == 3:
            view.end_step(batch // 4 + 1)
    assert len(left) == 4 and set(left) <= {"59.8 s", "59.9 s", "1 m 00 s", "1 m 01 s"}
    run.total_steps = 60
    view.draw(run, 50.0)
    assert " left" not in region(terminal.screen())[0] and " left" in region(terminal.screen())[1]
    view.place.close()


def test_what_stays_when_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A summary of the run in the place of the view, the table of costs, and the closing line."""
    terminal = at_terminal(monkeypatch)
    trainer = make_trainer(hooks=[Looks(terminal)])
    state = trainer.train()
    screen = terminal.screen()
    start = next(index for index, line in enumerate(screen) if line.startswith("run     "))
    assert screen[start].startswith("run         4/4 steps  epoch 1/1  0.")
    assert screen[start + 1] == f"loss        {state['latest_loss']:.4f}  mean {state['avg_loss']:.4f}  lr 0.1"
    assert screen[start + 2].startswith("validation  val/loss ")
    assert screen[start + 3].startswith("What each hook cost") and screen[-1].startswith("completed: 4 steps")
    assert not any("━─" in line for line in screen)


def test_the_loss_comes_from_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the record has it: the last loss and the mean of the epoch so far, of steps that are written."""
    terminal = at_terminal(monkeypatch)
    looks, losses = Looks(terminal), []
    trainer = make_trainer(data=make_batches(60), hooks=[looks])
    trainer.on("train_batch_end", name="losses")(lambda loss: losses.append(loss))
    trainer.train()
    assert region(looks.screens[10])[2].startswith("loss        -  mean -")
    written = next(step for step, screen in looks.screens.items() if "mean -" not in region(screen)[2]) - 1
    shown = f"loss        {losses[written - 1]:.4f}  mean {sum(losses[:written]) / written:.4f}"
    assert region(looks.screens[written + 1])[2].startswith(shown)
    stale = f"loss        {losses[written - 1]:.4f} at step {written}  mean"
    assert region(looks.screens[written + 5])[2].startswith(stale)


def test_metrics_of_training_are_in_the_line_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last ones that were recorded, as far as there is room."""
    terminal = at_terminal(monkeypatch)
    looks = Looks(terminal)
    metrics = ["mae", {"name": "mse", "as": "a_name_that_is_quite_long_for_it"}]
    trainer = make_trainer(data=make_batches(60), hooks=[looks], metrics=metrics)
    trainer.train()
    recorded = [f"mae {row['train/mae']:.4f}" for row in trainer.record.metrics]
    assert re.search(r"lr 0\.1  (mae \d\.\d{4})$", region(looks.screens[60])[2])[1] in recorded


def test_nothing_in_a_step_is_read_from_the_device() -> None:
    """The hook names no argument that costs something at an event of a step."""
    trainer = make_trainer(console=False)
    trainer.add_hook(ConsoleLogHook())
    for event in ("train_batch_start", "after_backward", "before_optimizer_step", "train_batch_end", "step_end"):
        assert "waits" not in trainer.hooks.explain(event) and "host read" not in trainer.hooks.explain(event)
    entry = trainer.hooks.entry("console_log")
    named = {name for event, listener in entry.listeners.items() if event != "on_train_end" for name in listener.wanted}
    assert not named & {"loss", "window_loss", "state", "grad_norm", "ctx", "metrics"}


def test_the_best_value_is_of_the_metric_that_a_hook_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger may be better; the metric comes first in its line."""
    terminal = at_terminal(monkeypatch)
    accuracies = iter([0.5, 0.9, 0.7])
    looks, stop = Looks(terminal), EarlyStopping(monitor="val/accuracy", mode="max", patience=9)
    trainer = make_trainer(data=make_batches(8), validate_every=2, sanity_batches=0, hooks=[looks, stop])
    trainer.on("validation_end", name="adds")(lambda metrics: metrics.update({"val/accuracy": next(accuracies, 0.6)}))
    trainer.train()
    assert "val/accuracy 0.7000  best 0.9000 at step 4  val/loss" in region(looks.screens[8])[3]


def test_the_parts_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As shares of its time, and a word if waiting for data takes much of it."""
    terminal = at_terminal(monkeypatch)
    run = PlainRun()
    view = LiveView(terminal)
    view.start(run, 0.0)
    report = StepReport(1, {
        "step_seconds": 0.01, "steps_per_s": 100.0, "samples_per_s": 3200.0, "tokens_per_s": 0.0,
        "data_wait_seconds": 0.006, "forward_backward_seconds": 0.003, "optimizer_seconds": 0.0005,
        "hooks_seconds": 0.0001,
    }, 1)  # fmt: skip
    view.draw(run, 1.0, report)
    shown = region(terminal.screen())
    assert shown[3] == "speed       3,200 samples/s  100 steps/s  1.0 s so far"
    assert shown[4] == "time        data 60% (input-bound)  fwd-bwd 30%  optim 5%  hooks 1%  other 4%"
    monkeypatch.setenv("COLUMNS", "60")
    view.draw(run, 1.0, report)
    assert region(terminal.screen())[4] == "time        data 60% (input-bound)  fwd-bwd 30%  optim 5%"
    report.values["data_wait_seconds"] = 0.001
    monkeypatch.setenv("COLUMNS", "100")
    view.draw(run, 1.0, report)
    assert region(terminal.screen(100))[4].endswith("data 10%  forward-backward 30%  optimizer 5%  hooks 1%  other 54%")
    view.place.close()


def test_the_memory_of_an_accelerator_and_its_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated now and at most, and once that is known, how much more it is after 1,000 steps."""
    terminal = at_terminal(monkeypatch)
    allocated = [1000]
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated[0] * 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3000 * 2**20)
    run, view = PlainRun(), LiveView(terminal)
    run.device = torch.device("cuda")
    view.start(run, 0.0)
    for step in range(1, 41):
        view.step, allocated[0] = step * 100, 1000 + step
        view.draw(run, float(step))
        if step == 30:
            assert region(terminal.screen())[-1] == "memory      1,030 MB  peak 3,000 MB"
    # From 1,001 MB around step 2,000 to 1,021 MB around step 4,000.
    assert region(terminal.screen())[-1] == "memory      1,040 MB  peak 3,000 MB  drift +10.0 MB per 1,000 steps"
    view.place.close()


def test_a_run_without_an_end_has_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader without a length: counts, and no time left."""
    terminal = at_terminal(monkeypatch)
    looks = Looks(terminal)

    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(make_batches(12))

    make_trainer(data=torch.utils.data.DataLoader(Endless(), batch_size=None), hooks=[looks]).train()
    shown = region(looks.screens[9])
    assert shown[0].split() == ["epoch", "1/1", "9", "batches"] and shown[1].split()[:3] == ["run", "8", "steps"]


# ---- other output ----------------------------------------------------------------------------------------------------


def test_prints_warnings_and_logs_are_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and in order, also from a handler that has held the stream since before the run."""
    terminal = at_terminal(monkeypatch)
    handler, mine = logging.StreamHandler(terminal), logging.getLogger("mine")
    mine.addHandler(handler)
    looks = Looks(terminal)

    class Talks(TrainingHook):
        def on_train_batch_start(self, step: int) -> None:
            print("printed", step)
            mine.warning("logged %d", step)
            print("twice", step, file=sys.stderr)

    trainer = make_trainer(data=make_batches(3), hooks=[Talks(), looks], sanity_batches=0)
    try:
        trainer.train()
    finally:
        mine.removeHandler(handler)
    screen = looks.screens[3]
    talk = [f"{how} {step}" for step in (1, 2, 3) for how in ("printed", "logged", "twice")]
    assert screen[1:11] == [*talk, ""] and [line.split()[0] for line in screen[11:]] == LABELS
    assert "write" not in vars(terminal) and "fileno" not in vars(terminal)


def test_another_progress_bar_is_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewritten in its line, as tqdm does; also several bars, of which the lower one moves the cursor up again."""
    terminal = at_terminal(monkeypatch)
    looks = Looks(terminal)

    class Bars(TrainingHook):
        def on_train_batch_start(self, step: int) -> None:
            sys.stderr.write(f"\r{step}: upper")
            sys.stderr.write(f"\n\r{step}: lower\x1b[A")

    make_trainer(data=make_batches(5), hooks=[Bars(), looks], sanity_batches=0, validate_every=3).train()
    screen = looks.screens[3]
    assert screen[1:3] == ["3: upper", "3: lower"] and [line.split()[0] for line in screen[3:]] == LABELS
    screen = looks.screens[5]  # after a validation, whose line stays
    assert screen[1].startswith("step 3  validation") and screen[2:4] == ["5: upper", "5: lower"]
    assert [line.split()[0] for line in screen[4:]] == WITH_VALIDATION


def test_an_unfinished_line_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dots, for example; a line of the hook begins below it."""
    looks = Looks(at_terminal(monkeypatch))
    trainer = make_trainer(hooks=[looks], sanity_batches=0, validate_every=3)
    trainer.on("train_batch_start", name="dots")(lambda: print(".", end=""))
    trainer.train()
    assert looks.screens[3][1] == "..." and looks.screens[3][2].startswith("epoch")
    assert looks.screens[4][1] == "..." and looks.screens[4][2].startswith("step 3  validation")
    assert looks.screens[4][3] == "." and looks.screens[4][4].startswith("epoch")


def test_lines_of_a_child_process_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not noticed: each leaves the cursor on the first line of the view, which is not left behind."""
    looks = Looks(at_terminal(monkeypatch))
    trainer = make_trainer(data=make_batches(3), hooks=[looks], sanity_batches=0, val_dataloader=None)
    trainer.on("train_batch_start", name="child")(lambda step: io.StringIO.write(looks.terminal, f"child {step}\n"))
    trainer.train()
    screen = looks.screens[3]
    assert screen[1:5] == ["child 1", "child 2", "child 3", ""] and [line.split()[0] for line in screen[5:]] == LABELS
    assert re.fullmatch(r"run         3/3 steps  epoch 1/1  .* steps/s", looks.terminal.screen()[4])


def test_a_prompt_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A debugger asks for the descriptor of the stream and writes past it: the view is erased before."""
    terminal = at_terminal(monkeypatch)
    seen: list[list[str]] = []

    class Asks(TrainingHook):
        def on_train_batch_start(self, step: int) -> None:
            if step == 3:
                with pytest.raises(io.UnsupportedOperation):
                    sys.stdout.fileno()
                seen.append(terminal.screen())

    make_trainer(hooks=[Asks()], sanity_batches=0).train()
    assert len(seen[0]) == 1 and seen[0][0].startswith("run ")


def test_runs_that_overlap_are_one_below_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """And end in any order; the stream is then what it was."""
    terminal = at_terminal(monkeypatch)
    runs, hooks = [PlainRun(), PlainRun()], [ConsoleLogHook(costs=False), ConsoleLogHook(costs=False)]
    for run, hook in zip(runs, hooks, strict=True):
        hook.on_train_start(run, 0)
    print("printed")
    screen = terminal.screen()
    assert screen[:2] == ["printed", ""] and [line.split()[0] for line in screen[2:]] == LABELS * 2
    hooks[0].close()
    assert [line.split()[0] for line in terminal.screen()[2:]] == LABELS
    hooks[1].close()
    assert terminal.screen() == ["printed"] and "write" not in vars(terminal)


def test_a_terminal_that_is_too_low_shows_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first lines; the screen does not scroll."""
    terminal = at_terminal(monkeypatch)
    monkeypatch.setenv("LINES", "3")
    hook = ConsoleLogHook()
    hook.on_train_start(PlainRun(), 0)
    assert [line.split()[0] for line in terminal.screen(rows=3) if line] == LABELS[:2]
    hook.close()


def test_a_terminal_without_a_size_has_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new pseudo-terminal, and those of some containers."""
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "__stdout__", None)  # whose size does not matter
    terminal, inner = pty.openpty()
    try:
        with os.fdopen(inner, "w", encoding="utf-8") as stream:
            assert os.get_terminal_size(inner) == (0, 0)
            os.set_blocking(terminal, False)
            hook = ConsoleLogHook(stream=stream)
            hook.on_train_start(PlainRun(), 0)
            shown = Terminal(os.read(terminal, 65536).decode()).screen(80, 24)
            hook.close()
    finally:
        os.close(terminal)
    assert [line.split()[0] for line in region(shown)] == LABELS


def test_a_drawing_replaces_the_last_one_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Erasing the lines before they are drawn again would flicker."""
    terminal = at_terminal(monkeypatch)
    run, hook = PlainRun(), ConsoleLogHook(costs=False)
    hook.on_train_start(run, 0)
    before = len(terminal.getvalue())
    hook.on_train_batch_end(run, 1, 0)
    drawn = terminal.getvalue()[before:]
    assert drawn.count("\x1b[J") == 1 and drawn.index("\x1b[J") < drawn.index("epoch")
    hook.close()


def test_a_hook_that_is_disabled_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view that stays as it was would look as if the run hung; once the hook is enabled it is there again."""
    looks = Looks(at_terminal(monkeypatch))
    trainer = make_trainer(data=make_batches(120), hooks=[looks])

    @trainer.on("train_batch_start", name="switches")
    def switch(trainer: Any, step: int) -> None:
        if step in (10, 110):
            (trainer.hooks.disable if step == 10 else trainer.hooks.enable)("console_log")

    trainer.train()
    is_shown = {step: any(line.startswith("epoch") for line in looks.screens[step]) for step in (9, 100, 120)}
    assert is_shown == {9: True, 100: False, 120: True}


def test_a_broken_terminal_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be written to it from some step on."""

    class Broken(Terminal):
        is_broken = False

        def write(self, text: str) -> int:
            if self.is_broken:
                raise OSError("no space left on device")
            return super().write(text)

    broken = Broken()
    monkeypatch.setattr(sys, "stdout", broken)
    trainer = make_trainer()
    trainer.on("step_end", name="breaks")(lambda: setattr(broken, "is_broken", True))
    trainer.train()
    assert trainer.step == 4 and all(not hook.failures for hook in trainer.hooks.list_hooks())


def test_a_failed_run_leaves_a_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The view is gone, and what comes next begins a line."""
    terminal = at_terminal(monkeypatch)
    trainer = make_trainer(data=make_batches(3), loss_fn=lambda prediction, target: losses.pop(), sanity_batches=0)
    losses = [trainer.model(torch.ones(4, 3)).mean()]
    with pytest.raises(IndexError):
        trainer.train()
    print("next")
    screen = terminal.screen()
    assert screen[-1] == "next" and screen[-2].startswith("failed (IndexError")
    assert any(line.startswith("run         1/3 steps") for line in screen) and "write" not in vars(terminal)


# ---- when there is one -----------------------------------------------------------------------------------------------


def hooks_during(trainer: Trainer) -> set[str]:
    """Train, and return the names of the hooks during the run."""
    names: set[str] = set()
    trainer.on("epoch_start", name="names")(lambda trainer: names.update(trainer.hooks))
    trainer.train()
    return names


def test_a_run_at_a_terminal_has_it_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the run alone; the hook is registered for it and removed afterwards."""
    terminal = at_terminal(monkeypatch)
    trainer = make_trainer()
    assert "console_log" in hooks_during(trainer) and "console_log" not in trainer.hooks
    assert "run         4/4 steps" in "\n".join(terminal.screen())


@pytest.mark.parametrize("how", ["console", "disabled", "renamed"])
def test_a_run_has_none_by_default_if(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`console` is off, or there is a hook of the user's, enabled or not."""
    terminal = at_terminal(monkeypatch)
    trainer = make_trainer(console=how != "console")
    if how != "console":
        trainer.add_hook(ConsoleLogHook(), "other" if how == "renamed" else None, enabled=how == "renamed")
    names = hooks_during(trainer)
    assert ("console_log" in names) == (how == "disabled")
    assert ("4/4 steps" in terminal.getvalue()) == (how == "renamed")


@pytest.mark.parametrize("output", ["a dumb terminal", "a file"])
def test_plain_lines_where_nothing_can_be_redrawn(output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default a line every 30 seconds and at the end, and lines about validations; no escape sequence."""
    stream: io.StringIO = at_terminal(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    if output == "a file":
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stdout", stream)
    trainer = make_trainer()
    assert "console_log" in hooks_during(trainer)
    text = stream.getvalue()
    assert "\x1b" not in text and "\r" not in text and "What each hook cost" not in text
    assert [line.split("  ")[1] for line in text.splitlines() if line.startswith("epoch")] == ["step 4/4"]
    assert "step 4  validation  val/loss" in text and "step 2/4" not in text


def test_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under NO_COLOR nothing is coloured, bold or dim; otherwise bars are."""
    terminal = at_terminal(monkeypatch)
    make_trainer().train()
    assert "\x1b[32m" in terminal.getvalue()
    terminal.truncate(0)
    monkeypatch.setenv("NO_COLOR", "1")
    make_trainer().train()
    view, _, _ = terminal.getvalue().partition("What each hook cost")
    assert "epoch 1/1" in view and not re.search(r"\x1b\[[\d;]*m", view)


def test_a_terminal_without_unicode_gets_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars of # and -."""

    class Ascii(Terminal):
        encoding = "ascii"

        def write(self, text: str) -> int:
            text.encode("ascii")
            return super().write(text)

    stream = Ascii()
    run = PlainRun()
    hook = ConsoleLogHook(stream=stream)
    hook.on_train_start(run, 0)
    hook.on_step_end(run, 3)
    hook.on_train_batch_end(run, 4, 3)
    assert re.match(r"run         #+-+ +3/6 steps  50%", region(stream.screen())[1])
    hook.close()


def test_hostile_names_are_made_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """A metric's name with an escape sequence does not reach the terminal."""
    terminal = at_terminal(monkeypatch)
    trainer = make_trainer(data=make_batches(2))
    trainer.on("validation_end", name="adds")(lambda metrics: metrics.update({"val/\x1b[2Jx": 0.5}))
    trainer.train()
    assert "\x1b[2J" not in terminal.getvalue() and "val/\\x1b[2Jx 0.5000" in terminal.getvalue()


def test_random_states_are_preserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The view draws no random numbers."""
    at_terminal(monkeypatch)
    make_trainer(console=False).train()
    before = random.getstate()
    make_trainer(data=make_batches(6)).train()
    assert random.getstate() == before


def test_any_host_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one without a record, which then has the losses."""
    terminal = at_terminal(monkeypatch)
    run = PlainRun()
    run.hooks.register(ConsoleLogHook(costs=False), on_error="raise")
    train(run, make_batches(6))
    assert "6/6 steps" in "\n".join(terminal.screen())


def test_a_notebook_replaces_one_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """As plain text; lines that stay are printed."""
    outputs: list[str] = []

    class Handle:
        def update(self, data: dict[str, str], raw: bool) -> None:
            outputs.append(data["text/plain"])

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Handle:
        assert not outputs
        outputs.append(data["text/plain"])
        return Handle()

    OutStream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})
    module = types.ModuleType("IPython.display")
    module.display = display
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    stream = OutStream()
    monkeypatch.setattr(sys, "stdout", stream)
    make_trainer().train()
    assert len(outputs) >= 5 and outputs[2].startswith("epoch 1/1   ━") and outputs[-1].startswith("run         4/4")
    assert "step 4  validation" in stream.getvalue() and "\x1b" not in "".join(outputs) + stream.getvalue()


# ---- at a real terminal ----------------------------------------------------------------------------------------------

SCRIPT = """
import logging, os, random, sys, time, warnings
import torch
logging.basicConfig()
from hookline import get_trainer, TrainingHook
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
data = [(torch.randn(4, 3), torch.randn(4, 1))] * 30
class Talks(TrainingHook):
    def on_train_batch_start(self, step):
        sys.stderr.write(f"\\rbar {step}")
        if step == 5:
            while not os.path.exists(os.environ["SEEN"]):
                time.sleep(0.01)
        if step % 10 == 0:
            sys.stderr.write("\\r")
            print(f"printed {step}")
            warnings.warn(f"warned {step}")
            logging.getLogger("mine").warning("logged %d", step)
        if step == 15:
            sys.stderr.write("\\r      \\r")
            print("answer", input("prompt? "))
assert "rich" not in sys.modules
random.seed(0)
trainer = get_trainer("simple", model, data, torch.optim.SGD(model.parameters(), 0.1), "cpu", hooks=[Talks()],
    loss_fn=torch.nn.functional.mse_loss, record=False)
trainer.train()
print("random", random.random())
"""


def test_a_real_terminal(tmp_path: Path) -> None:
    """Prints, warnings, logs, another bar, a prompt that is answered: neither they nor the view are broken."""
    answered: list[list[str]] = []
    seen = tmp_path / "seen"

    def answer(screen: list[str], descriptor: int) -> None:
        if "bar 5" in screen and any(line.startswith("run   ") for line in screen):
            seen.touch()
        if not answered and any(line.endswith("prompt?") for line in screen):
            answered.append(screen)
            os.write(descriptor, b"yes\n")

    random.seed(0)
    source = str(Path(hookline.__file__).parents[1])
    environment = {"PYTHONPATH": source, "PYTHONIOENCODING": "utf-8", "SEEN": str(seen)}
    screens, _ = run_at_terminal(SCRIPT, 80, 40, on_screen=answer, **environment)
    assert answered and answered[0][-1] == "prompt?"  # the view was erased
    last = "\n".join(screens[-1])
    for step in (10, 20, 30):
        assert f"\nprinted {step}\n" in last and f"UserWarning: warned {step}\n" in last
        assert f"\nWARNING:mine:logged {step}\n" in last
    assert "\nprompt? yes\nanswer yes\n" in last and f"random {random.random()}" in last
    assert seen.exists()  # the bar and the view were on one screen
    assert all(sum(line.startswith("speed") for line in screen) <= 1 for screen in screens)
    assert last.count("loss        ") == 1 and "completed: 30 steps" in last
