"""`HookManager`: a registry that can watch a model, with no trainer at all."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hookline.activations.manager import HookManager
from hookline.registry.base import ForwardHook, TrainingHook
from hookline.registry.registry import HookRegistry


class Steps(ForwardHook):
    """Keeps the steps it was called in."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_forward(self, step: int) -> None:
        self.steps.append(step)


def test_it_starts_empty_and_is_a_registry() -> None:
    """No second registry anywhere."""
    manager = HookManager()
    assert isinstance(manager, HookRegistry) and len(manager) == 0


def test_hooks_may_be_registered_before_or_after_watching() -> None:
    """Either order attaches them."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    manager, early, late = HookManager(), Steps(), Steps()
    manager.register(early, "early")
    manager.watch(model)
    manager.register(late, "late")
    model(torch.ones(1, 2))
    assert early.steps == late.steps == [0]


def test_watching_the_same_model_again_keeps_the_tap() -> None:
    """A trainer may give the run later; hooks are not attached twice."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    manager, hook = HookManager(), Steps()
    manager.register(hook)
    tap = manager.watch(model)
    assert manager.watch(model, SimpleNamespace(step=5)) is tap
    model(torch.ones(1, 2))
    assert hook.steps == [5]


def test_lifecycle_hooks_are_not_asked_for_modules() -> None:
    """Only hooks that hear on_forward select modules."""
    manager = HookManager()
    manager.watch(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    hook: Any = TrainingHook("plain")
    hook.modules = "nothing"
    assert manager.register(hook) == "plain"


@pytest.mark.req("000-02", "000-10")
def test_a_manager_made_from_a_config_watches_what_the_config_says() -> None:
    """Forward hooks of a config fire whenever the model runs."""
    manager = HookManager({"forward": [{"name": "activation_stats", "modules": "0"}]})
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    manager.watch(model)
    model(torch.ones(1, 2))
    assert set(manager.get("activation_stats").latest()) == {"0"}


def test_scheduled_forward_hooks_cost_their_modules_a_branch() -> None:
    """A hook that is not due leaves the slot empty."""
    manager, hook = HookManager(), Steps()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    manager.watch(model)
    manager.register(hook, every=2)
    from hookline.events.schedule import Reading

    for step in range(1, 5):
        manager.begin_batch(Reading(step, step, 1))
        model(torch.ones(1, 2))
        assert (manager.fire.on_forward is None) == (step % 2 == 1)
    assert len(hook.steps) == 2
