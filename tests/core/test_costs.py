"""Costs: exact on the host, estimated on the device, and reported if a hook takes too much of a run."""

import gc
import io
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import make_batches, make_trainer

from hookline import HookRegistry, Trainer, TrainingHook
from hookline.core.costs import Cost, cost_table
from hookline.core.entry import Entry
from hookline.core.schedule import Reading
from hookline.hooks.console.hook import print_costs


def test_costs_are_listed_by_hook_most_expensive_first(registry: HookRegistry) -> None:
    """An expensive outer event is seen at the top."""
    registry.register(lambda: None, "cheap", event="epoch_end")
    registry.register(lambda: time.sleep(0.01), "dear", event="epoch_end")
    registry.on_epoch_end()
    rows = registry.costs()
    assert [row["hook"] for row in rows] == ["dear", "cheap"] and rows[0]["seconds"] >= 0.01
    assert [row["calls"] for row in rows] == [1, 1]


def test_every_call_counts_inside_and_outside_of_steps(registry: HookRegistry) -> None:
    """Also of a hook that is rarely due; the time inside steps can be told apart."""

    class Sleeps(TrainingHook):
        def on_train_batch_end(self) -> None:
            time.sleep(0.002)

        def on_epoch_end(self) -> None:
            time.sleep(0.002)

    registry.register(Sleeps(), "always")
    registry.register(Sleeps(), "rarely", every=17)
    for number in range(1, 18):
        registry.begin_batch(Reading(number, number, 1))
        registry.slots.on_train_batch_end(None)
    registry.slots.on_epoch_end(None)
    rows = {row["hook"]: row for row in registry.costs()}
    assert (rows["always"]["calls"], rows["rarely"]["calls"]) == (18, 2)
    assert rows["always"]["seconds"] > 18 * 0.002 and rows["rarely"]["seconds"] > 2 * 0.002
    inner = registry.inner_seconds()
    assert 17 * 0.002 < inner["always"] <= rows["always"]["seconds"] - 0.002
    assert 0.002 < inner["rarely"] <= rows["rarely"]["seconds"] - 0.002


@pytest.mark.hooks_fail(raises=ZeroDivisionError)
def test_a_call_that_fails_counts_like_any_other(registry: HookRegistry) -> None:
    """Its time was spent."""
    registry.register(lambda: 1 / 0, "fails", event="epoch_end")
    registry.on_epoch_end()
    assert [(row["hook"], row["calls"]) for row in registry.costs()] == [("fails", 1)]


def test_dear_arguments_have_rows_of_their_own(registry: HookRegistry) -> None:
    """Reading a value that costs is listed beside the hooks; reading a free one is not listed."""

    class Args:
        step = 1

        @property
        def loss(self) -> float:
            time.sleep(0.002)
            return 0.5

    registry.register(lambda loss, step: None, "reads", event="validation_batch_end")
    for _ in range(3):
        registry.slots.on_validation_batch_end(Args())
    first, second = registry.costs()
    assert (first["hook"], first["kind"], first["calls"]) == ("reading loss", "argument", 3)
    assert first["seconds"] >= 0.006 and second["hook"] == "reads"


def test_the_default_update_hook_is_not_called() -> None:
    """It has nothing to do, and its row says so, alone and beside another update hook."""
    trainer = sleepy_trainer({})
    trainer.train()
    assert [(row["hook"], row["calls"]) for row in trainer.hooks.costs()] == [("identity", 0)]
    trainer.add_hook("clip_norm", max_norm=1e9)
    trainer.options.max_epochs = 3
    trainer.train()
    assert {row["hook"]: row["calls"] for row in trainer.hooks.costs()} == {"identity": 0, "clip_norm": 40}


class DeviceClock:
    """A device's clock: each event is a point of it, reached when `now` is past it."""

    now, reached, synchronized = 0.0, 0.0, 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        DeviceClock.now += 2.0
        self.at = DeviceClock.now

    def query(self) -> bool:
        return DeviceClock.reached >= self.at

    def synchronize(self) -> None:
        DeviceClock.synchronized += 1
        DeviceClock.reached = max(DeviceClock.reached, self.at)

    def elapsed_time(self, other: "DeviceClock") -> float:
        return other.at - self.at


class Quiet(TrainingHook):
    def on_train_batch_end(self) -> None: ...


@pytest.fixture
def with_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", DeviceClock)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    DeviceClock.now = DeviceClock.reached = 0.0
    DeviceClock.synchronized = 0


def fired(batches: int) -> Any:
    """A registry that has seen a given number of batches."""
    registry = HookRegistry()
    registry.register(Quiet())
    fire(registry, 1, batches)
    return registry


def fire(registry: Any, first: int, last: int) -> None:
    """Fire some batches, given by their numbers."""
    for number in range(first, last + 1):
        registry.begin_batch(Reading(steps=number, batches=number, epochs=1))
        registry.slots.on_train_batch_end(SimpleNamespace(step=1))


def test_some_calls_are_timed_on_the_device(with_device: None) -> None:
    """Two milliseconds a call here; the first and then one in 127 is timed for all."""
    registry = fired(2 * 127)
    assert DeviceClock.synchronized == 0
    (row,) = registry.costs()
    assert row["device_seconds"] == pytest.approx(2 * 127 * 0.002)
    assert DeviceClock.synchronized == 2


def test_collecting_without_waiting_takes_what_is_there(with_device: None) -> None:
    """The rest comes later, and nothing twice."""
    registry = fired(2 * 127)
    DeviceClock.reached = 4.0
    registry.device_timer.collect()
    cost = registry.entry("quiet").costs["on_train_batch_end"]
    assert cost.device_ns == 2_000_000
    registry.device_timer.collect()
    assert cost.device_ns == 2_000_000 and DeviceClock.synchronized == 0


def test_the_clock_itself_is_not_charged_to_the_hook(with_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making and recording its events takes longer than most hooks."""
    monkeypatch.setattr(DeviceClock, "record", lambda self: time.sleep(0.2) or setattr(self, "at", 0.0))
    (row,) = fired(17).costs()
    assert 0 < row["seconds"] < 2 * 0.2


def test_events_of_the_device_do_not_accumulate(with_device: None) -> None:
    """A run may be long, and its costs are asked for at the end."""
    DeviceClock.reached = float("inf")
    registry = fired(127 * 20)
    alive = sum(type(thing) is DeviceClock for thing in gc.get_objects())
    assert alive <= 4 and DeviceClock.synchronized == 0  # of 40 that were made
    assert registry.costs()[0]["device_seconds"] == pytest.approx(127 * 20 * 0.002)


def test_threads_that_collect_at_once_count_every_event_once(
    with_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward hooks may run in several threads, and each collects what the others left."""
    registry, query, counted = fired(2 * 127), DeviceClock.query, list[float]()
    DeviceClock.reached = float("inf")
    monkeypatch.setattr(DeviceClock, "elapsed_time", lambda self, other: counted.append(self.at) or 2.0)

    def while_another_thread_fires(self: DeviceClock) -> bool:
        monkeypatch.setattr(DeviceClock, "query", query)
        other = threading.Thread(target=fire, args=(registry, 2 * 127 + 1, 4 * 127))
        other.start()
        other.join()
        return query(self)

    monkeypatch.setattr(DeviceClock, "query", while_another_thread_fires)
    registry.device_timer.collect()
    registry.device_timer.collect()
    assert sorted(counted) == [2.0, 6.0, 10.0, 14.0]
    assert registry.entry("quiet").costs["on_train_batch_end"].device_calls == 4


def test_a_capture_into_a_graph_is_not_interrupted(with_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event that is queried or recorded then would break the capture; what was pending is counted later."""
    registry = fired(2 * 127)
    made = DeviceClock.now
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(DeviceClock, "query", lambda self: pytest.fail("an event was queried"))
    fire(registry, 2 * 127 + 1, 4 * 127)
    assert "device_seconds" not in registry.costs()[0]
    assert DeviceClock.now == made and DeviceClock.synchronized == 0
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert registry.costs()[0]["device_seconds"] == pytest.approx(4 * 127 * 0.002)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a stand-in for a device, where there is none")
def test_timing_on_a_device_does_not_call_what_passes_gradients_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The default update hook is left out of the chain, although the timer wraps it."""
    monkeypatch.setattr(torch.cuda, "Event", DeviceClock)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    trainer = make_trainer(data=make_batches(40))
    called: list[bool] = []
    # From the first step on, as if another part of the program had used the device then.
    trainer.on("train_start", name="start")(lambda: monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True))
    trainer.on("train_end")(monkeypatch.undo)
    trainer.on("before_optimizer_step", every=4)(lambda: called.append(trainer.hooks.slots.on_update is not None))
    trainer.train()
    assert called == [False] * 10


def test_without_a_device_nothing_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are as they always were."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    (row,) = fired(34).costs()
    assert set(row) == {"hook", "kind", "calls", "seconds"}


def test_the_console_has_a_column_where_there_is_something_to_say(capsys: pytest.CaptureFixture[str]) -> None:
    """And only there."""
    row = {"hook": "a", "kind": "lifecycle", "calls": 3, "seconds": 0.5}
    print_costs([row], 10.0, sys.stdout)
    assert "on the device" not in capsys.readouterr().out
    print_costs([{**row, "device_seconds": 0.25}], 10.0, sys.stdout)
    printed = capsys.readouterr().out
    assert "on the device" in printed and "0.250" in printed


class Sleeps(TrainingHook):
    """Takes three milliseconds of every batch at which it is called."""

    def on_train_batch_end(self) -> None:
        time.sleep(0.003)


def sleepy_trainer(hooks: dict[str, Any], **options: Any) -> Any:
    """Make a trainer of two epochs of 40 steps with sleeping hooks, by name and period."""
    trainer = make_trainer(data=make_batches(40), **{"max_epochs": 2, "warn_above": 0.1, **options})
    for name, every in hooks.items():
        trainer.add_hook(Sleeps(), name=name, every=every)
    return trainer


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0, "0.000 │ 0.0%"), (5.0, "5.000 │ 50.0%"), (16.0, "16.000 │ 100.0%")],
)
def test_a_share_of_the_run_is_never_above_one(seconds: float, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Though several threads may have called a hook at once."""
    print_costs([{"hook": "h", "kind": "update", "calls": 3, "seconds": seconds}], 10.0, sys.stdout)
    assert f"│ {shown} │" in " ".join(capsys.readouterr().out.split())


def costly(trainer: Any, monkeypatch: pytest.MonkeyPatch, warm_up: float = 0.0) -> list[str]:
    """Train and return what the record says about the cost of hooks."""
    monkeypatch.setattr("hookline.core.costs.WARM_UP_SECONDS", warm_up)
    trainer.train()
    return [f"{event['hook']}: {event['message']}" for event in trainer.record.events if event["kind"] == "hook_costly"]


def test_above_the_limit_it_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the share, the limit, and what to do about it; not about a hook that is below the limit."""
    trainer, began = sleepy_trainer({"often": None, "rarely": 40}), time.perf_counter()
    shares = {"often": 0.5, "rarely": 0.05}
    seconds = property(lambda entry: shares.get(entry.name, 0.0) * (time.perf_counter() - began))
    monkeypatch.setattr(Entry, "inner_seconds", seconds)
    (reported,) = costly(trainer, monkeypatch)
    assert reported.startswith("often: takes ") and "% of the run's time (limit 10%); give it a schedule" in reported


def test_the_console_does_not_accuse_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run has it by default; another hook that takes as much is reported."""
    trainer, began = sleepy_trainer({"other": None}), time.perf_counter()
    trainer.add_hook("console_log", stream=io.StringIO())
    monkeypatch.setattr(Entry, "inner_seconds", property(lambda entry: 0.5 * (time.perf_counter() - began)))
    reported = {text.partition(":")[0] for text in costly(trainer, monkeypatch)}
    assert "other" in reported and "console_log" not in reported


def test_time_outside_of_steps_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of validations."""
    trainer = sleepy_trainer({}, val_dataloader=make_batches(1), validate_every=10, max_steps=80)
    trainer.on("validation_end", name="slow")(lambda: time.sleep(0.05))
    (reported,) = costly(trainer, monkeypatch)
    assert reported.startswith("slow: takes ") and reported.endswith("most of it outside of steps: do less work there")


def test_what_comes_once_a_run_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a large share of a run that has just begun."""
    trainer = sleepy_trainer({})
    trainer.on("epoch_start", name="once")(lambda epoch: time.sleep(0.2 * (epoch == 0)))
    assert costly(trainer, monkeypatch) == []


def test_a_hook_with_a_schedule_is_reported_to_lengthen_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has one already."""
    (reported,) = costly(sleepy_trainer({"now_and_then": 2}), monkeypatch)
    assert "give it a longer period, or read fewer values" in reported


def test_nothing_is_said_before_the_run_has_settled_or_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps pay for warming up; `warn_above: null` says nothing at all."""
    assert costly(sleepy_trainer({"often": None}), monkeypatch, warm_up=60.0) == []
    assert costly(sleepy_trainer({"often": None}, warn_above=None), monkeypatch) == []


def test_a_hook_that_is_part_of_training_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """It works as often as it must."""
    monkeypatch.setattr(Sleeps, "intervenes", True)
    assert costly(sleepy_trainer({"often": None}), monkeypatch) == []


def test_what_an_earlier_run_cost_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that was costly and no longer is, is not reported."""
    trainer = sleepy_trainer({"often": None}, max_epochs=1)
    assert costly(trainer, monkeypatch, warm_up=60.0) == []
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    trainer.options.max_epochs = 2
    assert costly(trainer, monkeypatch) == [] and trainer.step == 80


def calls_of(trainer: Trainer) -> dict[str, int]:
    """Return how often each hook was called, as the record says."""
    return {row["hook"]: row["calls"] for row in trainer.record.run["costs"]}


def test_each_run_counts_its_own_calls() -> None:
    """A trainer's second run, and another trainer with the same hooks: their records have the calls of these runs."""
    trainer = make_trainer()

    trainer.on("train_batch_end", name="reads")(lambda loss: None)
    trainer.training_step(make_batches(1)[0])
    for run in (trainer.train, partial(trainer.fit, max_epochs=2)):
        run()
        assert calls_of(trainer)["reads"] == 4
    other = make_trainer(hooks=trainer.hooks)
    other.train()
    assert calls_of(other)["reads"] == 4


def test_arguments_that_cost_nothing_have_no_row_however_often_they_are_read() -> None:
    """A thousand reads of a counter are not worth a row; a slow argument is."""
    free, slow = Cost(calls=1000, ns=500_000), Cost(calls=1000, ns=5_000_000)
    assert [row["hook"] for row in cost_table([], {"step": free, "state": slow})] == ["reading state"]
