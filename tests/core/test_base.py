"""The base classes: nothing is required of those who inherit them."""

import inspect

import pytest

import hookline
from hookline import (
    ForwardHook,
    HookRegistry,
    HookRunner,
    StepContext,
    TrainerHooks,
    TrainingHook,
    UpdateHook,
    not_an_event,
)
from hookline.core.catalog import SPELLINGS


@pytest.mark.req("004-02")
def test_the_names_are_imported_from_hookline() -> None:
    """TrainingHook, StepContext and HookRunner are importable from hookline itself."""
    assert (hookline.TrainingHook, hookline.StepContext, hookline.HookRunner) == (TrainingHook, StepContext, HookRunner)
    assert TrainerHooks is TrainingHook


@pytest.mark.req("004-08")
def test_the_base_class_is_concrete_and_empty() -> None:
    """It can be made without arguments, every event of it can be called, and none does anything."""
    hook = TrainingHook()
    for spelling in SPELLINGS:
        assert getattr(hook, spelling)("any", more="thing") is None


@pytest.mark.req("004-08")
def test_only_what_is_overridden_is_called(registry: HookRegistry) -> None:
    """A hook that overrides one method listens to one event; the empty bodies are never called."""

    class Heartbeat(TrainingHook):
        def on_step_end(self, ctx: StepContext) -> None: ...

    registry.register(Heartbeat())
    assert list(registry.entry("heartbeat").listeners) == ["on_step_end"]
    assert registry.slots.on_train_end is None


def test_no_constructor_needs_to_be_called(registry: HookRegistry) -> None:
    """A hook with its own __init__ and no super().__init__() registers all the same."""

    class Mine(ForwardHook):
        def __init__(self, threshold: float) -> None:
            self.threshold = threshold

        def on_forward(self, name: str) -> None: ...

    assert registry.register(Mine(0.5)) == "mine"


def test_a_name_given_to_the_base_constructor_is_the_instances(registry: HookRegistry) -> None:
    """Two instances of one class can be told from each other."""

    class Idle(TrainingHook):
        def on_train_end(self) -> None: ...

    assert [registry.register(Idle("a")), registry.register(Idle("b"))] == ["a", "b"]


def test_update_hooks_intervene_and_observers_do_not() -> None:
    """Who changes training is listed as such."""
    assert UpdateHook.intervenes and not ForwardHook.intervenes and not TrainingHook.intervenes
    assert UpdateHook().init({}) == {}


def test_not_an_event_marks_and_returns_the_function() -> None:
    """The decorator changes nothing but the mark."""

    def on_helper() -> int:
        return 3

    assert not_an_event(on_helper) is on_helper and on_helper() == 3


@pytest.mark.req("004-11")
def test_step_context_has_its_seven_fields_in_order() -> None:
    """A dataclass that can be made by position."""
    assert list(inspect.signature(StepContext).parameters) == [
        "step", "loss", "grad_norm", "lr", "tokens_seen", "model", "optimizer",
    ]  # fmt: skip
    ctx = StepContext(1, 0.5, 2.0, 1e-3, 64, None, None)
    assert (ctx.step, ctx.loss, ctx.grad_norm, ctx.lr, ctx.tokens_seen) == (1, 0.5, 2.0, 1e-3, 64)
