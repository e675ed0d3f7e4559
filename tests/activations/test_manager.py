"""`HookManager`: a registry that can watch a model, with no trainer at all."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hookline import ForwardHook, HooklineError, HookManager, HookRegistry, TrainingHook


class Idle(TrainingHook):
    """A hook that does nothing when it is called."""

    def on_train_end(self) -> None: ...


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


def test_watching_the_same_model_again_keeps_the_dispatcher() -> None:
    """A trainer may give the run later; hooks are not attached twice."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    manager, hook = HookManager(), Steps()
    manager.register(hook)
    dispatcher = manager.watch(model)
    assert manager.watch(model, SimpleNamespace(step=5)) is dispatcher
    model(torch.ones(1, 2))
    assert hook.steps == [5]


def test_lifecycle_hooks_select_no_modules() -> None:
    """Only hooks with on_forward do."""
    manager = HookManager()
    manager.watch(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    hook: Any = Idle("plain")
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
    from hookline.core.schedule import Reading

    for step in range(1, 5):
        manager.begin_batch(Reading(step, step, 1))
        model(torch.ones(1, 2))
        assert (manager.slots.on_forward is None) == (step % 2 == 1)
    assert len(hook.steps) == 2


# ---- registering -----------------------------------------------------------------------------------------------------

BATCH = torch.randn(3, 4)
METHODS = ["register_capture_hook", "register_monitoring_hook", "register_debug_hook"]


def make_watched() -> tuple[nn.Sequential, HookManager]:
    """A model and a manager that watches it."""
    model, manager = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), HookManager()
    manager.watch(model)
    return model, manager


@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_the_options_of_a_registration(method: str) -> None:
    """A schedule, a failure policy, the switch and ranks."""
    _, manager = make_watched()
    options = {"every": 10, "on_error": "raise", "enabled": False, "ranks": 0}
    getattr(manager, method)("0", "hook", **options)
    entry = manager.entry("hook")
    assert (str(entry.schedule), entry.policy, entry.enabled, entry.ranks) == ("every 10 steps", "raise", False, {0})


@pytest.mark.parametrize("method", METHODS)
def test_a_misspelt_option_is_refused_with_the_nearest(method: str) -> None:
    """Among the options of the hook and of the registration."""
    _, manager = make_watched()
    with pytest.raises(HooklineError, match="has no parameter 'on_eror'; did you mean 'on_error'"):
        getattr(manager, method)("0", "hook", on_eror="raise")
    assert list(manager.list_hooks()) == []


@pytest.mark.parametrize("modules", [[], None, [None]])
@pytest.mark.parametrize("method", METHODS)
def test_a_selection_of_nothing_is_refused(modules: Any, method: str) -> None:
    """With a model and without: such a hook would never be called, and be in no report."""
    for manager in (make_watched()[1], HookManager()):
        with pytest.raises(HooklineError, match=r"hook 'hook': modules=.* selects nothing; '\*' selects all"):
            getattr(manager, method)(modules, "hook")


def test_a_named_condition_finds() -> None:
    """Like the same in a mapping."""
    model, manager = make_watched()
    manager.register_debug_hook("1", "guard", conditions=["nan", "absmax > 1e3"])
    model(BATCH)
    model(BATCH * 1e6)
    assert [finding.condition for finding in manager.get("guard").findings] == ["absmax > 1000"]


def test_a_function_among_named_conditions_is_called() -> None:
    """Names, mappings and functions can be in one list."""
    model, manager = make_watched()
    seen: list[str] = []
    ask: Callable[[str, Any], bool] = lambda name, output: bool(seen.append(name))  # noqa: E731
    manager.register_debug_hook("0", "guard", conditions=["nan", ask])
    model(BATCH)
    assert seen == ["0"]
