"""SIGTERM and SIGINT end a run in order: the step is finished, a checkpoint saved, everything closed."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import Pipe, active_children, current_process
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import builders
import pytest
import torch
from builders import batches_of, make_batches
from fresh_process import start, status_of
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from hookline import Trainer, TrainingHook
from hookline.checkpoints.store import read_manifest
from hookline.errors import CheckpointError
from hookline.trainer import signals

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def handlers_are_put_back() -> Iterator[None]:
    """Every test leaves the process' handlers as it found them."""
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before


OPTIONS = {"data": make_batches(6), "record": True}
make_trainer, train = partial(builders.make_trainer, **OPTIONS), partial(builders.train, **OPTIONS)


class Killed(TrainingHook):
    """Sends its own process a signal in the middle of a step, and records the events after it."""

    def __init__(self, number: int, at: int = 3) -> None:
        self.number, self.at = number, at
        self.received: list[str] = []
        self.closed = 0

    def on_after_backward(self, step: int) -> None:
        if step == self.at:
            os.kill(os.getpid(), self.number)

    def on_step_end(self, step: int) -> None:
        self.received.append(f"step {step}")

    def on_checkpoint_save(self, step: int) -> None:
        self.received.append(f"saved {step}")

    def on_exception(self) -> None:
        self.received.append("exception")

    def on_train_end(self, reason: str) -> None:
        self.received.append(f"end: {reason}")

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize(("number", "leaves"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_ends_the_run_in_order(number: signal.Signals, leaves: type[BaseException]) -> None:
    """The step is finished and saved, on_train_end fires and hooks are closed; then the signal has its way."""
    trainer = make_trainer(hook := Killed(number))
    with pytest.raises(leaves) as left:
        trainer.train()
    assert not isinstance(left.value, SystemExit) or left.value.code == 143
    assert hook.received == ["step 1", "step 2", "step 3", "saved 3", f"end: {number.name}"]
    assert hook.closed == 1
    run = json.loads((trainer.run_dir / "run.json").read_text())
    assert (run["outcome"], run["reason"]) == ("interrupted", number.name)
    assert '"kind":"stop_requested","step":3,"reason":"' + number.name in (trainer.run_dir / "events.jsonl").read_text()
    again = make_trainer()
    again.fit(resume=trainer.run_dir)
    whole = train(record=False)
    assert torch.equal(again.model[0].weight, whole.model[0].weight)


@pytest.mark.parametrize(("number", "said"), [(signal.SIGTERM, "a second one"), (signal.SIGINT, "press Ctrl-C again")])
def test_a_signal_is_acknowledged_at_once(number: signal.Signals, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Before the step is over, with a word about how to end without waiting; nothing with console=False."""
    for console in (True, False):
        trainer, seen = make_trainer(console=console), []
        trainer.add_hook(Killed(number))
        trainer.on("before_optimizer_step", at=3)(lambda seen=seen: seen.append(capfd.readouterr().err))
        with pytest.raises((SystemExit, KeyboardInterrupt)):
            trainer.train()
        assert (f"ending when this step is saved; {said}" in seen[0]) is console


@pytest.mark.parametrize("options", [{"record": False}, {"fast_dev_run": 4}], ids=str)
def test_a_run_that_writes_nothing_stops_all_the_same(
    options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """There is nowhere to save to: that is not an error, and the console does not promise it."""
    trainer = make_trainer(hook := Killed(signal.SIGTERM), console=True, **options)
    with pytest.raises(SystemExit):
        trainer.train()
    assert hook.received == ["step 1", "step 2", "step 3", "end: SIGTERM"]
    assert "ending when this step is done; a second one after 10 s ends now" in capfd.readouterr().err


def test_a_signal_while_the_run_is_ending(capfd: pytest.CaptureFixture[str]) -> None:
    """No step is left to save: it is said what the run waits for."""
    trainer = make_trainer(console=True)
    trainer.on("train_end", name="late")(lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
        trainer.train()
    assert "SIGTERM: ending when everything is written" in capfd.readouterr().err


def test_the_last_step_of_an_epoch() -> None:
    """The checkpoint is that of the epoch's end."""
    trainer = make_trainer(hook := Killed(signal.SIGTERM, at=6), max_epochs=2)
    with pytest.raises(SystemExit):
        trainer.train()
    assert hook.received[-2:] == ["saved 6", "end: SIGTERM"]
    assert trainer.progress.epoch_over


def test_a_signal_before_the_first_step() -> None:
    """Nothing is trained; the run can be gone on with."""
    trainer = make_trainer()
    trainer.on("train_start")(lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
        trainer.train()
    assert trainer.step == 0
    again = make_trainer()
    again.fit(resume=trainer.run_dir)
    assert again.step == 6


def test_a_signal_right_after_a_resume_saves_nothing_twice() -> None:
    """The checkpoint that was loaded holds this state; a fork has none yet."""
    first = make_trainer(Killed(signal.SIGTERM))
    with pytest.raises(SystemExit):
        first.train()

    def resume(fork: bool = False) -> list[str]:
        trainer = make_trainer()
        trainer.on("train_start")(lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(SystemExit):
            trainer.fit(resume=first.run_dir, fork=fork)
        return [path.name for path in trainer.checkpoint_dir.iterdir()]

    assert [resume(), resume(), resume(fork=True)] == [["step-00000003"]] * 3


def test_earlier_handlers_are_chained_and_restored() -> None:
    """The previous handler is called, and restored after the run."""
    received: list[int] = []

    def earlier(number: int, frame: Any) -> None:
        received.append(number)

    before = signal.signal(signal.SIGTERM, earlier)
    try:
        trainer = make_trainer(Killed(signal.SIGTERM))
        with pytest.raises(SystemExit):
            trainer.train()
        assert received == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is earlier
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_ignored_signal_stays_ignored() -> None:
    """A run in the background of a shell ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        trainer = train(Killed(signal.SIGINT))
        assert trainer.step == 6
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_was_set_during_the_run_stays() -> None:
    """It is not ours to take away."""

    def later(number: int, frame: Any) -> None: ...

    before = signal.getsignal(signal.SIGTERM)
    try:
        trainer = make_trainer()
        trainer.on("step_end", at=2)(lambda: signal.signal(signal.SIGTERM, later))
        trainer.train()
        assert signal.getsignal(signal.SIGTERM) is later
    finally:
        signal.signal(signal.SIGTERM, before)


def test_off_the_main_thread() -> None:
    """Python lets only the main thread handle signals; elsewhere a run works without."""
    trainer, before = make_trainer(), signal.getsignal(signal.SIGTERM)
    seen: list[Any] = []
    trainer.on("train_start")(lambda: seen.append(signal.getsignal(signal.SIGTERM)))
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert trainer.step == 6 and seen == [before]


def test_a_second_ctrl_c_leaves_at_once() -> None:
    """The step is not finished; the run is closed as after any interruption."""
    trainer = make_trainer(hook := Killed(signal.SIGINT))
    trainer.on("before_optimizer_step", at=3)(lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert hook.received == ["step 1", "step 2", "exception", "end: KeyboardInterrupt"]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["waiting", "async_save"])
@pytest.mark.parametrize("event", ["after_backward", "step_end", "checkpoint_save"])
@pytest.mark.parametrize("filename", [None, "mine_{step}"])
def test_a_signal_around_a_save_saves_once(filename: str | None, event: str, asynchronous: bool) -> None:
    """A checkpoint that a hook writes of the same state is enough, whatever its name and whenever the signal comes."""
    trainer = make_trainer(max_epochs=2, async_save=asynchronous)
    trainer.add_checkpointing(save_every_n_epochs=None, save_every_n_steps=4, filename=filename)
    trainer.on(event, name="signal")(lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 4 else None)
    with pytest.raises(SystemExit):
        trainer.train()
    steps = [read_manifest(path)["meta"]["step"] for path in trainer.checkpoint_dir.iterdir()]
    # A save in the background is reported some steps later; the last of them is then saved as well.
    assert 4 in steps and len(steps) == len(set(steps)) and max(steps) == trainer.step


def test_a_signal_after_the_last_save_in_the_background_saves_nothing_twice() -> None:
    """The checkpoint that was written holds the run's last state."""
    trainer, saved = make_trainer(async_save=True), list[int]()
    trainer.add_checkpointing()

    @trainer.on("checkpoint_save", name="signal")
    def signal_now(step: int) -> None:
        saved.append(step)
        if len(saved) == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        trainer.train()
    assert saved == [6]


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_hook_that_fails_after_a_signal_fails_the_run(accumulate: int) -> None:
    """Only an error of the loader is taken for a consequence of the signal, also at the end of a short window."""
    trainer = make_trainer(accumulate=accumulate)

    @trainer.on("before_optimizer_step", at=2, on_error="raise")
    def fails() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise ValueError("a hook's own")

    with pytest.raises(ValueError, match="a hook's own"):
        trainer.train()
    assert trainer.status == "error"


def test_a_signal_while_the_next_boundary_is_planned() -> None:
    """The run ends after this step, and not at the step that is being planned."""
    trainer = make_trainer()
    plan = trainer.next_boundaries

    def plan_late() -> list[int]:
        planned = plan()
        if trainer.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return planned

    trainer.next_boundaries = plan_late
    trainer.on("step_end", at=2)(lambda trainer: trainer.request_boundary())
    with pytest.raises(SystemExit):
        trainer.train()
    assert trainer.step == 2


def test_a_save_before_the_validation_of_its_step_is_not_enough() -> None:
    """The learning rate that a validation lowers afterwards is saved, too."""

    def make() -> Trainer:
        plateau = partial(ReduceLROnPlateau, factor=0.5, patience=0, threshold=100.0)
        trainer = make_trainer(scheduler=plateau, val_loaders=make_batches(1), validate_every=2)
        trainer.on("step_end", name="save", at=4)(lambda trainer: trainer.save_checkpoint("mine"))
        return trainer

    whole, stopped, resumed = make(), make(), make()
    stopped.on("step_end", name="signal", at=4)(lambda: os.kill(os.getpid(), signal.SIGTERM))
    whole.train()
    with pytest.raises(SystemExit):
        stopped.train()
    resumed.fit(resume=stopped.run_dir)
    assert resumed.lr == whole.lr < 0.1
    assert torch.equal(resumed.model[0].weight, whole.model[0].weight)


def test_a_failing_save_does_not_end_silently() -> None:
    """If the checkpoint cannot be written, the run ends with that error."""
    trainer = make_trainer(Killed(signal.SIGTERM))

    @trainer.on("train_start")
    def block(trainer: Trainer) -> None:
        trainer.checkpoint_dir.write_text("a file is in the way")

    with pytest.raises(CheckpointError, match="cannot write checkpoint"):
        trainer.train()


def train_until_stopped(seconds_a_step: float, begun: Connection) -> None:
    """Train, and say when training has begun."""
    trainer = make_trainer(max_epochs=1_000_000)
    trainer.on("train_start", name="ready")(lambda: begun.send(True))
    trainer.on("step_end", name="slow")(lambda: time.sleep(seconds_a_step))
    try:
        trainer.train()
    except KeyboardInterrupt:
        sys.exit(130)


@contextmanager
def training(seconds_a_step: float) -> Iterator[ForkServerProcess]:
    """Yield a process that trains until it is stopped, and has begun."""
    receiver, sender = Pipe(duplex=False)
    with receiver, sender:
        child = start(train_until_stopped, seconds_a_step, sender)
        sender.close()  # the process has its own, so that receiving fails if the process ends early
        assert receiver.recv()
    try:
        yield child
    finally:
        child.kill()  # has no effect unless an assertion failed


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_from_outside(number: signal.Signals, status: int) -> None:
    """It comes at any time; the status is the usual one, and one checkpoint is there."""
    with training(0.01) as child:
        time.sleep(0.1)
        os.kill(child.pid, number)
        assert status_of(child) == status
    assert len(list(Path("runs").glob("*/checkpoints/step-*"))) == 1


def get_sigterm_twice(repeat_seconds: float, first: int = signal.SIGTERM) -> None:
    """Train; two signals arrive in the third step, `repeat_seconds` apart or more."""
    signals.REPEAT_SECONDS = repeat_seconds
    trainer = make_trainer(Killed(first))
    trainer.on("before_optimizer_step", at=3)(lambda: os.kill(os.getpid(), signal.SIGTERM))
    try:
        trainer.train()
    except KeyboardInterrupt:
        sys.exit(130)


def test_a_later_sigterm_leaves_at_once() -> None:
    """The step is not finished, and nothing is saved."""
    assert status_of(start(get_sigterm_twice, 0.0)) == 143
    assert list(Path("runs").glob("*/checkpoints/*")) == []


@pytest.mark.parametrize(
    ("first", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["after SIGTERM", "after Ctrl-C"]
)
def test_a_sigterm_that_is_passed_on_is_no_second_request(first: signal.Signals, status: int) -> None:
    """A scheduler signals all processes, and a launcher passes its own signal on: the step is saved all the same."""
    assert status_of(start(get_sigterm_twice, 1e9, first)) == status
    assert [path.name for path in Path("runs").glob("*/checkpoints/*")] == ["step-00000003"]


def test_workers_that_get_ctrl_c_too() -> None:
    """A terminal sends Ctrl-C to the loader's workers as well; the current window still gets its batches."""
    loader = DataLoader(TensorDataset(*batches_of(24)[0]), batch_size=2, num_workers=2)
    trainer = make_trainer(data=loader, accumulate=6)

    @trainer.on("train_batch_end", at="2 batches")
    def ctrl_c() -> None:
        for process in [*active_children(), current_process()]:
            os.kill(process.pid, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.step == trainer.progress.steps_done == 1
    assert json.loads((trainer.run_dir / "run.json").read_text())["reason"] == "SIGINT"


# ---- a signal to the process group -----------------------------------------------------------------------------------


class Deadly(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Ends its whole process group when a certain sample is read, from inside a worker."""

    def __init__(self, deadly: int | None) -> None:
        (self.x, self.y), self.deadly = batches_of(48)[0], deadly

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == self.deadly and get_worker_info() is not None:
            os.killpg(0, signal.SIGTERM)
        return self.x[index], self.y[index]


def train_with_workers(how: str = "", deadly: int | None = None, resume: Path | None = None, **options: Any) -> Trainer:
    """24 batches from two workers; `how` says which processes are ended in the third step, or nothing."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Dropout(0.1))
    batches = 0

    def step(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        nonlocal batches
        batches += 1
        if how and batches == 3:
            workers = [worker.pid for worker in active_children() if worker.pid]
            # From another process: torch's workers end without an error if their parent asks them to.
            if (killer := os.fork()) == 0:
                if how == "group":
                    os.killpg(0, signal.SIGTERM)
                for pid in workers:
                    os.kill(pid, signal.SIGKILL if how == "only workers" else signal.SIGTERM)
                os._exit(0)
            for pid in workers:
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # torch's handler of SIGCHLD is called from here on
            os.waitpid(killer, 0)
            if how == "workers first":
                os.kill(os.getpid(), signal.SIGTERM)
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    options = {"data": DataLoader(Deadly(deadly), batch_size=2, num_workers=2), "loss_fn": None, **options}
    trainer = make_trainer(model=model, step_fn=step, **options)
    trainer.fit(resume=resume)
    return trainer


def train_in_own_group(**how: Any) -> None:
    """Train in a process group of its own."""
    os.setsid()
    train_with_workers(**how)


def end_of_group(**how: Any) -> int:
    """Return the exit status of the first process of such a group."""
    return status_of(start(train_in_own_group, **how))


def check_resumed(**options: Any) -> None:
    """Resume the only run, and compare it with one that was never stopped."""
    (run,) = Path("runs").iterdir()
    assert json.loads((run / "run.json").read_text())["outcome"] == "interrupted"
    resumed, whole = train_with_workers(resume=run, **options), train_with_workers(record=False, **options)
    assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))


@pytest.mark.parametrize("how", ["group", "workers first"])
def test_a_signal_to_the_process_group(how: str) -> None:
    """The loader's workers die before the step is over: it is completed and saved, and the exit status is the usual."""
    assert end_of_group(how=how) == 143
    assert [path.name for path in Path("runs").glob("*/checkpoints/*")] == ["step-00000003"]
    check_resumed()


def test_a_signal_to_the_process_group_while_a_batch_is_read() -> None:
    """A batch that never comes is not a failure: the steps that are done are saved."""
    assert end_of_group(deadly=20) == 143
    assert len(list(Path("runs").glob("*/checkpoints/step-*"))) == 1
    check_resumed()


def test_a_step_whose_batches_never_come_is_saved_apart() -> None:
    """Half a window cannot be resumed exactly, so that a plain resume starts from the checkpoint before it."""
    assert end_of_group(how="group", accumulate=12) == 143
    assert [path.name for path in Path("runs").glob("*/exception/*")] == ["step-00000000"]
    (run,) = Path("runs").iterdir()
    assert '"kind":"loader_failed"' in (run / "events.jsonl").read_text()
    check_resumed(accumulate=12)


@pytest.mark.soak
@pytest.mark.parametrize("deadly", range(1, 48, 2))
def test_a_signal_to_the_process_group_at_any_sample(deadly: int) -> None:
    """Wherever the run is when a worker reads this sample, nothing is lost."""
    assert end_of_group(deadly=deadly) == 143
    check_resumed()


class FailsOnSignal(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Validation samples of which the sixth comes with SIGTERM and an error, as from a worker that the signal ended."""

    def __init__(self, failing: bool) -> None:
        self.failing, self.read = failing, 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read += 1
        if self.failing and self.read == 6:
            os.kill(os.getpid(), signal.SIGTERM)
            raise RuntimeError("DataLoader worker exited unexpectedly")
        return torch.full((3,), float(index)), torch.ones(1)


@pytest.mark.parametrize("validate_every", ["2 steps", "1 epoch"])
def test_a_validation_whose_batches_never_come_is_not_saved(validate_every: str) -> None:
    """The model then has averaged weights, which is not a state to resume.

    The run ends as any that a signal ends, and resumes from its last checkpoint.
    """

    def make(failing: bool) -> Trainer:
        trainer = make_trainer(
            scheduler=partial(StepLR, step_size=1, gamma=0.5), scheduler_interval="epoch", max_epochs=2,
            val_loaders=DataLoader(FailsOnSignal(failing), batch_size=2), validate_every=validate_every,
            sanity_batches=0,
        )  # fmt: skip
        trainer.add_hook("ema", decay=0.5)
        return trainer

    whole, failed, resumed = make(False), make(True), make(False)
    weights: list[torch.Tensor] = []
    failed.on("step_end", name="weights")(lambda model: weights.append(model[0].weight.detach().clone()))
    whole.train()
    with pytest.raises(SystemExit) as ended:
        failed.train()
    assert ended.value.code == 143 and failed.record.run["outcome"] == "interrupted"
    assert torch.equal(failed.model[0].weight, weights[-1])
    resumed.fit(resume=failed.run_dir)
    assert torch.equal(resumed.model[0].weight, whole.model[0].weight)
    assert resumed.lr == whole.lr


class FailsAtAnEpoch(DataLoader[Any]):
    """A loader whose second epoch comes with SIGTERM and an error, as from lasting workers that the signal ended."""

    failing, epochs = False, 0

    def __iter__(self) -> Any:
        self.epochs += 1
        if self.failing and self.epochs == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            raise RuntimeError("DataLoader worker exited unexpectedly")
        return super().__iter__()


def test_workers_that_die_while_an_epoch_starts() -> None:
    """The run ends as any that a signal ends, and resumes exactly."""

    def make(failing: bool) -> Trainer:
        loader = FailsAtAnEpoch(Deadly(None), batch_size=16)
        loader.failing = failing
        return make_trainer(data=loader, max_epochs=3)

    whole, failed, resumed = make(False), make(True), make(False)
    whole.train()
    with pytest.raises(SystemExit) as ended:
        failed.train()
    assert ended.value.code == 143 and failed.record.run["outcome"] == "interrupted"
    assert failed.step == 3
    resumed.fit(resume=failed.run_dir)
    assert torch.equal(resumed.model[0].weight, whole.model[0].weight)


class UnprintableError(Exception):
    """An exception whose text cannot be made."""

    def __str__(self) -> str:
        raise TypeError("no text")


class Unprintable(Deadly):
    """Training samples of which one comes with SIGTERM and such an exception."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == self.deadly:
            os.kill(os.getpid(), signal.SIGTERM)
            raise UnprintableError
        return super().__getitem__(index)


def test_a_loader_error_without_a_text_is_recorded() -> None:
    """The run still ends as after any signal."""
    trainer = make_trainer(data=DataLoader(Unprintable(9), batch_size=2))
    with pytest.raises(SystemExit):
        trainer.train()
    assert "UnprintableError: (its message cannot be shown" in (trainer.run_dir / "events.jsonl").read_text()
    assert [path.name for path in trainer.run_dir.glob("checkpoints/*")] == ["step-00000004"]


def test_a_worker_that_dies_alone_is_reported_by_its_loader() -> None:
    """Not in the middle of a step; the error also says what torch's handler had to say."""
    with pytest.raises(RuntimeError, match="exited unexpectedly") as caught:
        train_with_workers(how="only workers", max_epochs=2)
    assert any("killed by signal: Killed" in note for note in caught.value.__notes__)


def test_a_worker_that_dies_in_a_run_after_one_that_sigterm_ended() -> None:
    """A process that survives its SystemExit, as a notebook does, may train again."""
    trainer = make_trainer(Killed(signal.SIGTERM))
    train_with_workers()  # installs torch's handler
    with pytest.raises(SystemExit):
        trainer.train()
    assert end_of_group(how="group") == 143
    test_a_worker_that_dies_alone_is_reported_by_its_loader()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_forked_process_dies_as_it_should(number: signal.Signals) -> None:
    """The handler that it has inherited is not its own."""
    ends: list[int] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            try:
                os.kill(os.getpid(), number)
                time.sleep(10)
            except BaseException:
                os._exit(77)
            os._exit(0)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    trainer = make_trainer()
    trainer.on("step_end", at=2)(fork)
    trainer.train()
    assert ends == [-number if number == signal.SIGTERM else 77]
    assert trainer.step == 6
