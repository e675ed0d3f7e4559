"""Costs: scaled up from samples, timed on the device, and reported if a hook takes too much of a run."""

import time
from typing import Any

import pytest
import torch

from hookline import HookRegistry, Schedule, SimpleTrainer, TrainingHook, UpdateHook
from hookline.core import costs
from hookline.core.costs import Cost, CostMonitor, cost_table
from hookline.core.entry import Entry, find_listeners
from hookline.core.schedule import Reading
from hookline.hooks.console_log import print_costs


class Watch(TrainingHook):
    """A lifecycle hook."""

    def on_step_end(self) -> None: ...


class Link(UpdateHook):
    """An update hook."""

    def on_update(self, grads: object) -> None: ...


def entry(name: str, hook: object, inner: Cost, outer: Cost) -> Entry:
    """A hook with these accounts."""
    listeners = find_listeners(hook)
    return Entry(name, hook, 1, listeners, False, "warn", Schedule(), inner_cost=inner, outer_cost=outer)


def cost(ns: int, calls: int) -> Cost:
    """An account."""
    found = Cost()
    found.ns, found.calls = ns, calls
    return found


def test_costs_are_listed_by_hook_most_expensive_first() -> None:
    """An expensive outer event is seen at the top."""
    registry = HookRegistry()
    registry.register(lambda: None, "cheap", event="epoch_end")
    registry.register(lambda: time.sleep(0.01), "dear", event="epoch_end")
    registry.on_epoch_end()
    rows = registry.costs()
    assert [row["hook"] for row in rows] == ["dear", "cheap"] and rows[0]["seconds"] >= 0.01
    assert [row["calls"] for row in rows] == [1, 1]


def test_samples_stand_for_more_than_themselves() -> None:
    """Time inside steps is scaled, by the hook's own scale, and time outside is not."""
    watch = entry("watch", Watch(), cost(1_000_000, 2), cost(5_000_000, 1))
    other = entry("other", Watch(), cost(1_000_000, 2), cost(0, 0))
    scale = {"watch": 16.0, "other": 1.0}.__getitem__
    rows = cost_table([other, watch], {}, scale)
    assert [(row["hook"], row["calls"], round(row["seconds"], 6)) for row in rows] == [
        ("watch", 33, 0.021), ("other", 2, 0.001),
    ]  # fmt: skip


def test_dear_arguments_have_rows_of_their_own() -> None:
    """Reading a value that costs is listed beside the hooks; reading a free one is no news."""
    arguments = {"loss": cost(2_000_000, 7), "step": cost(90_000, 1000)}
    (row,) = cost_table([], arguments, lambda name: 1.0)
    assert row == {"hook": "reading loss", "kind": "argument", "calls": 7, "seconds": 0.002}


def test_a_link_that_never_ran_is_not_listed() -> None:
    """The default update hook costs nothing and says nothing; a watcher that called nothing is still listed."""
    link, watch = entry("link", Link(), Cost(), Cost()), entry("watch", Watch(), Cost(), Cost())
    assert [row["hook"] for row in cost_table([link, watch], {}, lambda name: 1.0)] == ["watch"]


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


class Moment:
    step = 1


@pytest.fixture
def with_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", DeviceClock)
    DeviceClock.now = DeviceClock.reached = 0.0
    DeviceClock.synchronized = 0


def fired(batches: int) -> Any:
    """A registry that has seen a given number of batches."""
    registry = HookRegistry()
    registry.register(Quiet())
    for number in range(1, batches + 1):
        registry.begin_batch(Reading(steps=number, batches=number, epochs=1))
        registry.slots.on_train_batch_end(Moment())  # type: ignore[misc]
    return registry


def test_sampled_batches_are_timed_on_the_device(with_device: None) -> None:
    """Two milliseconds a call here; one in 17 batches is sampled, one in eight of those on the device for all."""
    registry = fired(17 * 16)
    assert DeviceClock.synchronized == 0
    (row,) = registry.costs()
    assert row["device_seconds"] == pytest.approx(17 * 16 * 0.002)
    assert DeviceClock.synchronized == 2


def test_collecting_without_waiting_takes_what_is_there(with_device: None) -> None:
    """The rest comes later, and nothing twice."""
    registry = fired(17 * 16)
    DeviceClock.reached = 4.0
    registry.device_timer.collect()
    entry = registry.entry("quiet")
    assert entry.inner_cost.device_ns == 2_000_000
    registry.device_timer.collect()
    assert entry.inner_cost.device_ns == 2_000_000 and DeviceClock.synchronized == 0


def test_the_clock_itself_is_not_charged_to_the_hook(with_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making and recording its events takes longer than most hooks."""
    monkeypatch.setattr(DeviceClock, "record", lambda self: time.sleep(0.02) or setattr(self, "at", 0.0))
    (row,) = fired(17).costs()
    assert 0 < row["seconds"] < 17 * 0.02


def test_without_a_device_nothing_is_added() -> None:
    """The rows are as they always were."""
    (row,) = fired(34).costs()
    assert set(row) == {"hook", "kind", "calls", "seconds"}


def test_the_console_has_a_column_where_there_is_something_to_say(capsys: pytest.CaptureFixture[str]) -> None:
    """And only there."""
    import sys

    row = {"hook": "a", "kind": "lifecycle", "calls": 3, "seconds": 0.5}
    print_costs([row], 10.0, sys.stdout)
    assert "on the device" not in capsys.readouterr().out
    print_costs([{**row, "device_seconds": 0.25}], 10.0, sys.stdout)
    printed = capsys.readouterr().out
    assert "on the device" in printed and "0.250" in printed


class Anything(TrainingHook):
    def on_train_batch_end(self) -> None: ...


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A trainer, and a clock that stands at 0 until it is reported otherwise."""
    model = torch.nn.Linear(2, 1)
    made: Any = SimpleTrainer(
        model, [torch.ones(1, 2)], torch.optim.SGD(model.parameters(), lr=0.1), "cpu", record=False, console=False
    )
    made.add_hook(Anything(), name="often")
    made.add_hook(Anything(), name="now_and_then", every=10)
    made.clock = 0.0
    monkeypatch.setattr(costs, "perf_counter", lambda: made.clock)
    return made


def reports(trainer: Any, seconds: dict[str, float], at: float = 10.0) -> list[str]:
    """What is said after a given number of seconds, when the hooks have taken a given number of."""
    reported: list[str] = []
    trainer.clock = 0.0
    monitor = CostMonitor(trainer, trainer.options.warn_above)
    trainer.hooks.failures.subscribe(
        lambda incident: reported.append(f"{incident.kind} {incident.hook}: {incident.message}")
    )
    trainer.hooks.inner_seconds = lambda: seconds
    trainer.clock = at
    monitor.check()
    monitor.check()
    return reported


def test_above_the_limit_it_is_said_once(trainer: Any) -> None:
    """With the share, the limit, and what to do about it."""
    reported = reports(trainer, {"often": 1.0, "now_and_then": 0.49})
    remedy = "give it a schedule, such as every=10, or read fewer values"
    assert reported == [f"costly often: takes 10% of the run's time (limit 5%); {remedy}"]


def test_a_hook_with_a_schedule_is_reported_to_lengthen_it(trainer: Any) -> None:
    """It has one already."""
    assert "give it a longer period" in reports(trainer, {"now_and_then": 2.0})[0]


def test_nothing_is_said_before_the_run_has_settled(trainer: Any) -> None:
    """The first steps pay for warming up."""
    assert reports(trainer, {"often": 4.0}, at=4.9) == []


def test_the_limit_is_the_users(trainer: Any) -> None:
    """`warn_above: null` says nothing at all."""
    trainer.options.warn_above = 0.5
    assert reports(trainer, {"often": 4.0}) == []
    trainer.options.warn_above = None
    assert reports(trainer, {"often": 9.0}) == []


def test_what_an_earlier_run_cost_does_not_count(trainer: Any) -> None:
    """The accounts continue over several runs."""
    trainer.hooks.entry("often").inner_cost.ns = 10**10
    monitor = CostMonitor(trainer, trainer.options.warn_above)
    reported: list[Any] = []
    trainer.hooks.failures.subscribe(reported.append)
    trainer.clock = 10.0
    monitor.check()
    assert not reported
