"""A step that hangs is detected while it hangs, and the stack of every thread is recorded."""

import copy
import threading
import time
from functools import partial
from typing import Any, ClassVar

import builders
import pytest
import torch
from builders import make_batches, train

from hookline import StallWatchdog, Trainer
from hookline.errors import ConfigError
from hookline.record import read_events

make_trainer = partial(builders.make_trainer, record=True)


def events_of(trainer: Trainer) -> list[dict[str, Any]]:
    """Return what the hook wrote into events.jsonl."""
    return [event for event in read_events(trainer.run_dir) if event["kind"].startswith("stall")]


def watchdog_threads() -> list[str]:
    """Return the names of the threads of watchdogs."""
    return [thread.name for thread in threading.enumerate() if "watchdog" in thread.name]


def sleep_in_a_hook(seconds: float) -> None:
    time.sleep(seconds)


def test_a_hanging_step_is_in_the_record(caplog: pytest.LogCaptureFixture) -> None:
    """Once, with the line on which the training thread hangs, and once more when it is over."""
    trainer = make_trainer(hook := StallWatchdog(seconds=0.1))
    trainer.on("before_backward", name="hang")(lambda step: sleep_in_a_hook(0.5) if step == 3 else None)
    trainer.train()
    stall, over = events_of(trainer)
    assert (stall["kind"], stall["step"], stall["by"]) == ("stall", 3, "stall_watchdog")
    assert 0.1 <= stall["seconds"] < 0.4
    main = next(stack for stack in stall["stacks"] if stack["thread"] == threading.main_thread().name)
    assert "in sleep_in_a_hook: time.sleep(seconds)" in main["stack"][-1]
    assert over["kind"] == "stall_over" and 0.4 < over["seconds"] < 2
    assert any("sleep_in_a_hook" in line for line in caplog.messages)
    assert hook.stalls == 1


def test_other_threads_are_recorded() -> None:
    """Where they wait is often what a hang is about."""
    free = threading.Event()
    waiting = threading.Thread(target=free.wait, args=(5,), name="waits forever")
    waiting.start()
    trainer = make_trainer(StallWatchdog(seconds=0.05), data=make_batches(1))
    trainer.on("before_backward", name="hang")(lambda: sleep_in_a_hook(0.3))
    trainer.train()
    free.set()
    waiting.join()
    assert "waits forever" in [stack["thread"] for stack in events_of(trainer)[0]["stacks"]]


def test_a_run_that_makes_progress_is_not_reported() -> None:
    """Steps, validation batches and calls of `beat` all count; no thread is left afterwards."""
    trainer = make_trainer(hook := StallWatchdog(seconds=0.4), data=make_batches(5), val_dataloader=make_batches(3))
    trainer.on("step_end", name="slow")(lambda: sleep_in_a_hook(0.1))
    trainer.on("validation_batch_end", name="slow too")(lambda: sleep_in_a_hook(0.1))

    @trainer.on("epoch_end", name="long work")
    def long_work() -> None:
        for _ in range(5):
            sleep_in_a_hook(0.1)
            hook.beat()

    trainer.train()
    assert hook.stalls == 0 and events_of(trainer) == []
    assert watchdog_threads() == []


def test_each_stall_is_reported_once() -> None:
    """Two hangs, two stalls; a long one is not repeated."""
    trainer = make_trainer(hook := StallWatchdog(seconds=0.05), data=make_batches(3))
    trainer.on("before_backward", name="hang")(lambda step: sleep_in_a_hook(0.3) if step != 2 else None)
    trainer.on("step_end", name="pause")(lambda: sleep_in_a_hook(0.02))
    trainer.train()
    assert [event["kind"] for event in events_of(trainer)][:3] == ["stall", "stall_over", "stall"]
    assert hook.stalls == 2


def test_it_can_be_added_during_a_run() -> None:
    """It does not get on_train_start, and does not need it."""
    trainer, hook = make_trainer(), StallWatchdog(seconds=0.1)
    trainer.on("step_end", at=1, name="add")(lambda trainer: trainer.add_hook(hook))
    trainer.on("before_backward", at=3, name="hang")(lambda: sleep_in_a_hook(0.4))
    trainer.train()
    assert hook.stalls == 1 and [event["step"] for event in events_of(trainer)][:1] == [3]


class SlowToBegin(list[Any]):
    """A loader that is slow to give its first batch."""

    def __iter__(self) -> Any:
        sleep_in_a_hook(0.4)
        return super().__iter__()


@pytest.mark.parametrize("where", ["loader", "model"])
def test_a_sanity_check_that_hangs_is_reported(where: str) -> None:
    """Whether the first batch does not come, or the model does not return."""

    def step(model: Any, batch: Any) -> torch.Tensor:
        sleep_in_a_hook(0.4 if where == "model" and not model.training else 0.0)
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    data = SlowToBegin(make_batches(1)) if where == "loader" else make_batches(1)
    options = {"val_dataloader": data, "validate_every": None, "loss_fn": None, "step_fn": step}
    trainer = make_trainer(StallWatchdog(seconds=0.1), **options)
    validations: list[str] = []
    trainer.on("validation_start", name="other")(lambda: validations.append("validation"))
    trainer.train()
    assert [event["kind"] for event in events_of(trainer)] == ["stall", "stall_over"]
    assert events_of(trainer)[0]["step"] == 0
    assert watchdog_threads() == []
    assert validations == []  # other hooks do not get the sanity check


def test_a_subclass_may_override_an_event_with_other_arguments() -> None:
    """The other events do not call it with the arguments of the base class."""

    class Started(StallWatchdog):
        models: ClassVar[list[Any]] = []

        def on_train_start(self, model: torch.nn.Module) -> None:
            self.models.append(model)

    trainer = make_trainer(data=make_batches(1), val_dataloader=make_batches(1), sanity_batches=1)
    trainer.add_hook(Started(), on_error="raise")
    trainer.train()
    assert Started.models == [trainer.model]


def test_the_time_after_the_last_step_does_not_count() -> None:
    """Slow hooks at the end of the run are not a stall."""
    trainer = make_trainer(hook := StallWatchdog(seconds=0.1))
    trainer.on("train_end", name="slow")(lambda: sleep_in_a_hook(0.4))
    trainer.train()
    assert hook.stalls == 0


def test_single_steps_are_watched_and_the_time_between_them_is_not() -> None:
    """The time between single steps does not count, and no thread is left."""
    trainer = make_trainer(hook := StallWatchdog(seconds=0.1), record=False)
    trainer.on("before_backward", at=2, name="hang")(lambda: sleep_in_a_hook(0.4))
    batch = trainer.train_loaders["train"][0]
    for stalls in (0, 1):
        trainer.training_step(batch)
        assert hook.stalls == stalls
        sleep_in_a_hook(0.3)
        assert watchdog_threads() == []


def test_it_warns_before_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk that the record is on may be what hangs."""
    order: list[str] = []
    monkeypatch.setattr("hookline.hooks.base.logger.warning", lambda *message, **_: order.append("warned"))
    trainer = make_trainer(StallWatchdog(seconds=0.05), record=False)
    note = trainer.note
    monkeypatch.setattr(trainer, "note", lambda kind, **fields: order.append(kind) or note(kind, **fields))
    trainer.on("before_backward", at=2, name="hang")(lambda: sleep_in_a_hook(0.3))
    trainer.train()
    assert order[:2] == ["warned", "stall"]


def test_a_failing_run_stops_it_too() -> None:
    """The thread ends with the run, however that ends."""
    trainer = make_trainer(StallWatchdog())
    trainer.on("step_end", name="bomb", on_error="raise")(lambda: 1 / 0)
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert time.monotonic() - began < 5
    assert watchdog_threads() == []


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
    other = train(twin)
    assert other.step == 4
    assert watchdog_threads() == []
