"""Device time is taken with the device's own clock, on sampled batches, and nothing waits for it."""

import time
from typing import Any

import pytest
import torch

from hookline import HookRegistry, TrainingHook
from hookline.core.schedule import Reading
from hookline.hooks.console_log import print_costs


class Clock:
    """A device's clock: each event is a point of it, reached when `now` is past it."""

    now, reached, synchronized = 0.0, 0.0, 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        Clock.now += 2.0
        self.at = Clock.now

    def query(self) -> bool:
        return Clock.reached >= self.at

    def synchronize(self) -> None:
        Clock.synchronized += 1
        Clock.reached = max(Clock.reached, self.at)

    def elapsed_time(self, other: "Clock") -> float:
        return other.at - self.at


class Quiet(TrainingHook):
    def on_train_batch_end(self) -> None: ...


class Moment:
    step = 1


@pytest.fixture
def with_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    Clock.now = Clock.reached = 0.0
    Clock.synchronized = 0


def fired(batches: int) -> Any:
    """A registry after some batches."""
    registry = HookRegistry()
    registry.register(Quiet())
    for number in range(1, batches + 1):
        registry.begin_batch(Reading(steps=number, batches=number, epochs=1))
        registry.slots.on_train_batch_end(Moment())  # type: ignore[misc]
    return registry


def test_sampled_batches_are_timed_on_the_device(with_device: None) -> None:
    """Two milliseconds a call here; one in 17 batches is sampled, one in eight of those on the device for all."""
    registry = fired(17 * 16)
    assert Clock.synchronized == 0
    (row,) = registry.costs()
    assert row["device_seconds"] == pytest.approx(17 * 16 * 0.002)
    assert Clock.synchronized == 2


def test_collecting_without_waiting_takes_what_is_there(with_device: None) -> None:
    """The rest comes later, and nothing twice."""
    registry = fired(17 * 16)
    Clock.reached = 4.0
    registry.device_timer.collect()
    entry = registry.entry("quiet")
    assert entry.inner_cost.device_ns == 2_000_000
    registry.device_timer.collect()
    assert entry.inner_cost.device_ns == 2_000_000 and Clock.synchronized == 0


def test_the_clock_itself_is_not_charged_to_the_hook(with_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making and recording its events takes longer than most hooks."""
    monkeypatch.setattr(Clock, "record", lambda self: time.sleep(0.02) or setattr(self, "at", 0.0))
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
