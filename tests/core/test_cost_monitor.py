"""A hook that takes too much of the run's time is told of once, with its name and a remedy."""

from typing import Any

import pytest
import torch

from hookline import SimpleTrainer, TrainingHook
from hookline.core import costs
from hookline.core.costs import CostMonitor


class Anything(TrainingHook):
    def on_train_batch_end(self) -> None: ...


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A trainer, and a clock that stands at 0 until it is told otherwise."""
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
    """What is said after so many seconds, when the hooks have taken so many."""
    told: list[str] = []
    trainer.clock = 0.0
    monitor = CostMonitor(trainer, trainer.options.warn_above)
    trainer.hooks.failures.subscribe(
        lambda incident: told.append(f"{incident.kind} {incident.hook}: {incident.message}")
    )
    trainer.hooks.inner_seconds = lambda: seconds
    trainer.clock = at
    monitor.check()
    monitor.check()
    return told


def test_above_the_limit_it_is_said_once(trainer: Any) -> None:
    """With the share, the limit, and what to do about it."""
    told = reports(trainer, {"often": 1.0, "now_and_then": 0.49})
    remedy = "give it a schedule, such as every=10, or read fewer values"
    assert told == [f"costly often: takes 10% of the run's time (limit 5%); {remedy}"]


def test_a_hook_with_a_schedule_is_told_to_lengthen_it(trainer: Any) -> None:
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
    """The accounts go on over several runs."""
    trainer.hooks.entry("often").inner_cost.ns = 10**10
    monitor = CostMonitor(trainer, trainer.options.warn_above)
    told: list[Any] = []
    trainer.hooks.failures.subscribe(told.append)
    trainer.clock = 10.0
    monitor.check()
    assert not told
