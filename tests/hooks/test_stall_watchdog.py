"""A step that hangs is detected while it hangs, and the stack of every thread is recorded."""

import copy
import threading
import time
from typing import Any, ClassVar

import builders
import pytest
import torch
from builders import make_batches

from hookline import StallWatchdog, Trainer
from hookline.errors import ConfigError
from hookline.hooks import stall_watchdog
from hookline.record import read_events


class Watchdog(StallWatchdog):
    """Counts how often it has checked."""

    checks = 0

    def _wait_one_check(self, *args: Any) -> bool:
        self.checks += 1
        return super()._wait_one_check(*args)


class Clock:
    """A clock that moves only when a test lets time pass, so that a busy machine is not taken for a stall."""

    now = 0.0

    def pass_time(self, hook: Watchdog, seconds: float) -> None:
        """Move on, and return when the watchdog has checked the new time, or has ended."""
        self.now += seconds
        thread, checks = hook._thread, hook.checks + 2  # one check may have begun before the clock moved
        while thread is not None and thread.is_alive() and hook.checks < checks:
            time.sleep(0.001)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Give the watchdog a clock that the test moves."""
    made = Clock()
    monkeypatch.setattr(stall_watchdog, "monotonic", lambda: made.now)
    return made


def make_trainer(steps: int = 4, **options: Any) -> Trainer:
    options = {"record": True, **options}
    return builders.make_trainer(data=make_batches(steps, 2, 2), model=torch.nn.Linear(2, 1), **options)


def events_of(trainer: Trainer) -> list[dict[str, Any]]:
    """Return what the hook wrote into events.jsonl."""
    return [event for event in read_events(trainer.run_dir) if event["kind"].startswith("stall")]


def test_a_hanging_step_is_in_the_record(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Once, with the line on which the training thread hangs, and once more when it is over."""
    trainer, hook = make_trainer(), Watchdog(seconds=0.1)
    trainer.add_hook(hook)
    trainer.on("before_backward", name="hang")(lambda step: clock.pass_time(hook, 0.5) if step == 3 else None)
    trainer.train()
    stall, over = events_of(trainer)
    assert (stall["kind"], stall["step"], stall["by"]) == ("stall", 3, "stall_watchdog")
    assert stall["seconds"] == over["seconds"] == 0.5
    main = next(stack for stack in stall["stacks"] if stack["thread"] == threading.main_thread().name)
    assert "in pass_time: time.sleep(0.001)" in main["stack"][-1]
    assert over["kind"] == "stall_over"
    assert any("in pass_time" in line for line in caplog.messages)
    assert hook.stalls == 1


def test_other_threads_are_recorded(clock: Clock) -> None:
    """Where they wait is often what a hang is about."""
    free = threading.Event()
    waiting = threading.Thread(target=free.wait, name="waits forever", daemon=True)
    waiting.start()
    trainer, hook = make_trainer(steps=1), Watchdog(seconds=0.05)
    trainer.add_hook(hook)
    trainer.on("before_backward", name="hang")(lambda: clock.pass_time(hook, 0.3))
    trainer.train()
    free.set()
    waiting.join()
    assert "waits forever" in [stack["thread"] for stack in events_of(trainer)[0]["stacks"]]


def test_a_run_that_makes_progress_is_not_reported(clock: Clock) -> None:
    """Steps, validation batches and calls of `beat` all count; no thread is left afterwards."""
    hook = Watchdog(seconds=0.4)
    trainer = make_trainer(steps=5, val_dataloader=[(torch.ones(2, 2), torch.ones(2, 1))] * 3)
    trainer.add_hook(hook)
    trainer.on("step_end", name="slow")(lambda: clock.pass_time(hook, 0.3))
    trainer.on("validation_batch_end", name="slow too")(lambda: clock.pass_time(hook, 0.3))

    @trainer.on("epoch_end", name="long work")
    def long_work() -> None:
        for _ in range(5):
            clock.pass_time(hook, 0.3)
            hook.beat()

    trainer.train()
    assert hook.stalls == 0 and events_of(trainer) == []
    assert [thread.name for thread in threading.enumerate() if "watchdog" in thread.name] == []


def test_each_stall_is_reported_once(clock: Clock) -> None:
    """Two hangs, two stalls; a long one is not repeated."""
    trainer, hook = make_trainer(steps=3), Watchdog(seconds=0.05)
    trainer.add_hook(hook)
    trainer.on("before_backward", name="hang")(lambda step: clock.pass_time(hook, 0.3) if step != 2 else None)
    trainer.on("step_end", name="pause")(lambda: clock.pass_time(hook, 0.02))
    trainer.train()
    assert [event["kind"] for event in events_of(trainer)][:3] == ["stall", "stall_over", "stall"]
    assert hook.stalls == 2


def test_it_can_be_added_during_a_run(clock: Clock) -> None:
    """It does not get on_train_start, and does not need it."""
    trainer, hook = make_trainer(), Watchdog(seconds=0.1)
    trainer.on("step_end", at=1, name="add")(lambda trainer: trainer.add_hook(hook))
    trainer.on("before_backward", at=3, name="hang")(lambda: clock.pass_time(hook, 0.4))
    trainer.train()
    assert hook.stalls == 1 and [event["step"] for event in events_of(trainer)][:1] == [3]


@pytest.mark.parametrize("where", ["loader", "model"])
def test_a_sanity_check_that_hangs_is_reported(where: str, clock: Clock) -> None:
    """Whether the first batch does not come, or the model does not return."""
    hook = Watchdog(seconds=0.1)

    class SlowToBegin(list[Any]):
        def __iter__(self) -> Any:
            clock.pass_time(hook, 0.4)
            return super().__iter__()

    def step(model: Any, batch: Any) -> torch.Tensor:
        if where == "model" and not model.training:
            clock.pass_time(hook, 0.4)
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    batches = [(torch.ones(2, 2), torch.ones(2, 1))]
    data = SlowToBegin(batches) if where == "loader" else batches
    trainer = make_trainer(val_dataloader=data, validate_every=None, step_fn=step)
    trainer.add_hook(hook)
    validations: list[str] = []
    trainer.on("validation_start", name="other")(lambda: validations.append("validation"))
    trainer.train()
    assert [event["kind"] for event in events_of(trainer)] == ["stall", "stall_over"]
    assert events_of(trainer)[0]["step"] == 0
    assert [thread.name for thread in threading.enumerate() if "watchdog" in thread.name] == []
    assert validations == []  # other hooks do not get the sanity check


def test_a_subclass_may_override_an_event_with_other_arguments() -> None:
    """The other events do not call it with the arguments of the base class."""

    class Started(StallWatchdog):
        models: ClassVar[list[Any]] = []

        def on_train_start(self, model: torch.nn.Module) -> None:  # type: ignore[override]
            self.models.append(model)

    batch = (torch.ones(2, 2), torch.ones(2, 1))
    trainer = make_trainer(steps=1, val_dataloader=[batch], sanity_batches=1)
    trainer.add_hook(Started(), on_error="raise")
    trainer.train()
    assert Started.models == [trainer.model]


def test_the_time_after_the_last_step_does_not_count(clock: Clock) -> None:
    """Slow hooks at the end of the run are not a stall."""
    trainer, hook = make_trainer(), Watchdog(seconds=0.1)
    trainer.add_hook(hook)
    trainer.on("train_end", name="slow")(lambda: clock.pass_time(hook, 0.4))
    trainer.train()
    assert hook.stalls == 0


def test_single_steps_are_watched_and_the_time_between_them_is_not(clock: Clock) -> None:
    """The time between single steps does not count, and no thread is left."""
    trainer, hook = make_trainer(record=False), Watchdog(seconds=0.1)
    trainer.add_hook(hook)
    trainer.on("before_backward", at=2, name="hang")(lambda: clock.pass_time(hook, 0.4))
    batch = trainer.train_loaders["train"][0]  # type: ignore[index]
    for stalls in (0, 1):
        trainer.training_step(batch)
        assert hook.stalls == stalls
        clock.pass_time(hook, 0.3)
        assert [thread.name for thread in threading.enumerate() if "watchdog" in thread.name] == []


def test_it_warns_before_it_writes(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk that the record is on may be what hangs."""
    order: list[str] = []
    monkeypatch.setattr("hookline.hooks.base.logger.warning", lambda *message, **_: order.append("warned"))
    trainer, hook = make_trainer(record=False), Watchdog(seconds=0.05)
    trainer.add_hook(hook)
    note = trainer.note
    monkeypatch.setattr(trainer, "note", lambda kind, **fields: order.append(kind) or note(kind, **fields))
    trainer.on("before_backward", at=2, name="hang")(lambda: clock.pass_time(hook, 0.3))
    trainer.train()
    assert order[:2] == ["warned", "stall"]


def test_a_failing_run_stops_it_too() -> None:
    """The thread ends with the run, however that ends."""
    trainer = make_trainer()
    trainer.add_hook(StallWatchdog(stall_watchdog.MAX_SECONDS))  # its thread sleeps longer than a test may take
    trainer.on("step_end", name="bomb", on_error="raise")(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert [thread.name for thread in threading.enumerate() if "watchdog" in thread.name] == []


@pytest.mark.parametrize("seconds", [0, -1, True, "5", float("inf"), float("nan")])
def test_an_invalid_time_is_rejected(seconds: Any) -> None:
    """It must be a number above zero."""
    with pytest.raises(ConfigError, match="seconds"):
        StallWatchdog(seconds)


def test_a_copy_watches_nothing_yet() -> None:
    """Made in the middle of a run, it has the same parameters, no thread, and watches another run."""

    class Mine(StallWatchdog):
        def __init__(self, words: list[str]) -> None:
            super().__init__(seconds=7)
            self.words = words

    trainer, hook = make_trainer(), Mine(["a"])
    trainer.add_hook(hook, name="dog")
    twins: list[Any] = []
    trainer.on("step_end", name="copy")(lambda: twins.append(copy.deepcopy(hook)))
    trainer.train()
    twin = twins[0]
    assert type(twin) is Mine and (twin.seconds, twin.stalls) == (7, 0)
    assert twin.words == ["a"] and twin.words is not hook.words and twin.registered_name == "stall_watchdog"
    other = make_trainer()
    other.add_hook(twin)
    other.train()
    assert other.step == 4
    assert not [thread for thread in threading.enumerate() if "watchdog" in thread.name]
