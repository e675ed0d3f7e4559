"""Events fired from a user's own loop: values by position or by name, and the caller's mistakes."""

import copy
from typing import Any

import pytest

from hookline import HooklineError, HookRegistry, HookRunner, StepContext
from hookline.errors import MissingArgument


def registry_with(**functions: Any) -> HookRegistry:
    """Make a registry with one function for each event."""
    registry = HookRegistry()
    for event, function in functions.items():
        registry.on(event, name=f"on {event}")(function)
    return registry


def test_values_are_passed_by_position_or_by_name() -> None:
    seen: list[Any] = []
    registry = registry_with(train_batch_end=lambda batch, loss, step: seen.append((batch, loss, step)))
    registry.on_train_batch_end("the batch", 0.5, step=3)
    assert seen == [("the batch", 0.5, 3)]


@pytest.mark.parametrize("spelling", ["on_validation_end", "on_eval_end"])
def test_validation_metrics_reach_hooks_of_both_spellings(spelling: str, registry: HookRegistry) -> None:
    seen: list[Any] = []
    for name in ("on_validation_end", "on_eval_end"):
        registry.register(lambda metrics, step: seen.append((metrics, step)), name, event=name)
    getattr(registry, spelling)(metrics={"loss": 1.0}, step=3)
    assert seen == [({"loss": 1.0}, 3)] * 2


def test_a_missing_value_names_the_event_the_hooks_and_the_remedy(registry: HookRegistry) -> None:
    """The message tells the caller which hooks need the value and how to pass it."""
    for name in ("halve", "clip"):
        registry.register(lambda loss: None, name, event="train_batch_end")
    with pytest.raises(MissingArgument, match=r"on_train_batch_end: 'halve', 'clip' names 'loss'.*pass loss="):
        registry.on_train_batch_end()
    assert issubclass(MissingArgument, TypeError) and issubclass(MissingArgument, HooklineError)


def test_what_a_call_leaves_out_keeps_its_default(registry: HookRegistry) -> None:
    """Arguments behind it come by keyword; one that cannot keeps its default, too."""
    seen: list[Any] = []

    def open_to_all(batch: Any = "none", loss: float = 9.0, step: int = 0, *, epoch: int = 9, **more: Any) -> None:
        seen.append((batch, loss, step, epoch, "loss" in more or "batch" in more))

    def by_position(loss: float = 9.0, batch: Any = "none", /, step: int = 0) -> None:
        seen.append((loss, batch, step))

    def by_alias(batch: Any = "none", loader_name: str = "none") -> None:
        seen.append((batch, loader_name))

    def by_name(batch: Any = "none", dataloader_name: str = "none") -> None:
        seen.append((batch, dataloader_name))

    for hook in (open_to_all, by_position):
        registry.register(hook, event="train_batch_end")
    for hook in (by_alias, by_name):
        registry.register(hook, event="before_backward")
    registry.on_train_batch_end("the batch", step=3, epoch=1)
    registry.on_train_batch_end(loss=0.5, step=4, epoch=1)
    assert seen == [("the batch", 9.0, 3, 1, False), (9.0, "none", 3), ("none", 0.5, 4, 1, False), (0.5, "none", 4)]
    seen.clear()
    registry.on_before_backward(dataloader_name="b")
    assert seen == [("none", "b")] * 2


@pytest.mark.hooks_fail(raises=ZeroDivisionError)
def test_a_failure_without_a_step_is_reported_at_step_0() -> None:
    """A report never fails itself because the call passed too little."""
    incidents: list[Any] = []
    registry = registry_with(train_end=lambda: 1 / 0)
    registry.failures.subscribe(incidents.append)
    registry.on_train_end()
    registry.on_train_end(step=9)
    assert [incident.step for incident in incidents] == [0, 9]


def test_mistakes_of_the_caller_are_type_errors() -> None:
    """Too many values, one given twice, and an unknown name, with the right order or the nearest name."""
    registry = registry_with(train_batch_end=lambda: None)
    with pytest.raises(TypeError, match=r"takes 3 values by position \(batch, loss, state\), got 4"):
        registry.on_train_batch_end(1, 2, 3, 4)
    with pytest.raises(TypeError, match="got 'loss' twice"):
        registry.on_train_batch_end(1, 2, loss=2)
    with pytest.raises(TypeError, match=r"no argument 'losss'; did you mean 'loss'"):
        registry.on_train_batch_end(losss=2)


def test_hooks_may_name_what_ctx_contains() -> None:
    ctx, seen = StepContext(7, 0.5, 1.5, 1e-3, 640, "model", "optimizer"), []
    runner = HookRunner()
    runner.on("step_end")(lambda step, loss, grad_norm, ctx: seen.append((step, loss, grad_norm, ctx)))
    runner.on_step_end(ctx)
    assert seen == [(7, 0.5, 1.5, ctx)]


def test_state_supplies_what_the_call_left_out() -> None:
    """It never overrides what the call passed."""
    state, seen = {"latest_loss": 9.0, "current_epoch": 2, "current_batch_idx": 4, "model": "m"}, []
    registry = registry_with(
        train_batch_end=lambda loss, epoch, batch_idx, model, metrics: seen.append(
            (loss, epoch, batch_idx, model, copy.copy(metrics))
        )
    )
    registry.on_train_batch_end("batch", 0.5, state)
    assert seen == [(0.5, 2, 4, "m", {"loss": 0.5})]


def test_aliases_of_arguments_are_accepted() -> None:
    """loader_name is dataloader_name."""
    seen: list[str] = []
    registry = registry_with(train_batch_start=lambda dataloader_name: seen.append(dataloader_name))
    registry.on_train_batch_start(loader_name="a")
    assert seen == ["a"]
