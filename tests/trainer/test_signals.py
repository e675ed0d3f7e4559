"""SIGTERM and SIGINT end a run in order: the step is finished, a checkpoint saved, everything closed."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from hookline import Trainer, TrainingHook, get_trainer
from hookline.errors import CheckpointError

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def handlers_are_put_back() -> Iterator[None]:
    """Every test leaves the process' handlers as it found them."""
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before


def make_trainer(**options: Any) -> Trainer:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(6)]
    options = {"console": False, "loss_fn": torch.nn.functional.mse_loss, **options}
    return get_trainer("simple", model, data, torch.optim.SGD(model.parameters(), 0.1), "cpu", **options)


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
    trainer, hook = make_trainer(), Killed(number)
    trainer.add_hook(hook)
    with pytest.raises(leaves) as left:
        trainer.train()
    assert not isinstance(left.value, SystemExit) or left.value.code == 143
    assert hook.received == ["step 1", "step 2", "step 3", "saved 3", f"end: {number.name}"]
    assert hook.closed == 1
    assert trainer.run_dir is not None
    run = json.loads((trainer.run_dir / "run.json").read_text())
    assert (run["outcome"], run["reason"]) == ("interrupted", number.name)
    assert '"kind":"stop_requested","step":3,"reason":"' + number.name in (trainer.run_dir / "events.jsonl").read_text()
    again = make_trainer()
    again.fit(resume=trainer.run_dir)
    whole = make_trainer(record=False)
    whole.train()
    assert torch.equal(again.model.weight, whole.model.weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"record": False}, {"fast_dev_run": 4}])
def test_a_run_that_writes_nothing_stops_all_the_same(options: dict[str, Any]) -> None:
    """There is nowhere to save to, and that is no error."""
    trainer, hook = make_trainer(**options), Killed(signal.SIGTERM)
    trainer.add_hook(hook)
    with pytest.raises(SystemExit):
        trainer.train()
    assert hook.received == ["step 1", "step 2", "step 3", "end: SIGTERM"]


def test_the_last_step_of_an_epoch() -> None:
    """The checkpoint is that of the epoch's end."""
    trainer, hook = make_trainer(max_epochs=2), Killed(signal.SIGTERM, at=6)
    trainer.add_hook(hook)
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


def test_earlier_handlers_are_chained_and_restored() -> None:
    """The previous handler is called, and restored after the run."""
    received: list[int] = []

    def earlier(number: int, frame: Any) -> None:
        received.append(number)

    before = signal.signal(signal.SIGTERM, earlier)
    try:
        trainer = make_trainer()
        trainer.add_hook(Killed(signal.SIGTERM))
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
        trainer = make_trainer()
        trainer.add_hook(Killed(signal.SIGINT))
        trainer.train()
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
    trainer, hook = make_trainer(), Killed(signal.SIGINT)
    trainer.add_hook(hook)
    trainer.on("before_optimizer_step", at=3)(lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert hook.received == ["step 1", "step 2", "exception", "end: KeyboardInterrupt"]


def test_a_failing_save_does_not_end_silently() -> None:
    """If the checkpoint cannot be written, the run ends with that error."""
    trainer, hook = make_trainer(), Killed(signal.SIGTERM)
    trainer.add_hook(hook)

    @trainer.on("train_start")
    def block(trainer: Trainer) -> None:
        assert trainer.checkpoint_dir is not None
        trainer.checkpoint_dir.write_text("a file is in the way")

    with pytest.raises(CheckpointError, match="cannot write checkpoint"):
        trainer.train()


def start(seconds_a_step: float) -> int:
    """A process that trains until it is stopped, and has begun; forked, because importing torch takes seconds."""
    begun, tell = os.pipe()
    child = os.fork()
    if child:
        os.read(begun, 1)
        return child
    status: Any = 1
    try:
        trainer = make_trainer(max_epochs=1_000_000)
        trainer.on("train_start", name="ready")(lambda: os.write(tell, b"x"))
        trainer.on("step_end", name="slow")(lambda: time.sleep(seconds_a_step))
        trainer.train()
    except SystemExit as left:
        status = left.code
    except KeyboardInterrupt:
        status = 130
    finally:
        os._exit(status)


def status_of(child: int) -> int:
    """How a process ended."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_from_outside(number: signal.Signals, status: int) -> None:
    """It comes at any time; the status is the usual one, and one checkpoint is there."""
    child = start(0.01)
    time.sleep(0.1)
    os.kill(child, number)
    assert status_of(child) == status
    assert len(list(Path("runs").glob("*/checkpoints/step-*"))) == 1


def test_a_second_sigterm_leaves_at_once() -> None:
    """While the step still sleeps; nothing is saved."""
    child = start(60)
    time.sleep(0.3)
    os.kill(child, signal.SIGTERM)
    time.sleep(0.3)
    assert os.waitpid(child, os.WNOHANG) == (0, 0)
    os.kill(child, signal.SIGTERM)
    assert status_of(child) == 143
    assert list(Path("runs").glob("*/checkpoints/*")) == []


def test_workers_that_get_ctrl_c_too() -> None:
    """A terminal sends Ctrl-C to the loader's workers as well; the current window still gets its batches."""
    data = TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    loader = DataLoader(data, batch_size=2, num_workers=2)
    trainer = get_trainer(
        "simple", model, loader, torch.optim.SGD(model.parameters(), 0.1), "cpu", accumulate=6, console=False,
        loss_fn=torch.nn.functional.mse_loss,
    )  # fmt: skip

    @trainer.on("train_batch_end", at="2 batches")
    def ctrl_c() -> None:
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        for pid in [*map(int, children), os.getpid()]:
            os.kill(pid, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.step == trainer.progress.steps_done == 1
    assert json.loads((trainer.run_dir / "run.json").read_text())["reason"] == "SIGINT"  # type: ignore[operator]


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
        ends.append(status_of(child))

    trainer = make_trainer()
    trainer.on("step_end", at=2)(fork)
    trainer.train()
    assert ends == [-number if number == signal.SIGTERM else 77]
    assert trainer.step == 6
