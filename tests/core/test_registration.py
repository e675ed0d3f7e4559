"""What may be registered, and what an entry takes from the call, from the hook and from its class."""

from typing import Any

import pytest

from hookline.core.base import ForwardHook, TrainingHook, UpdateHook
from hookline.core.registry import HookRegistry
from hookline.core.schedule import Schedule
from hookline.errors import ConfigError, HooklineError, RegistrationError


class Ours(TrainingHook):
    """As the built-ins are written."""

    built_in, runs_last = True, True
    schedule, on_error = Schedule.parse(every=7), "raise"

    def on_step_end(self) -> None: ...


class Theirs(Ours):
    """A user's subclass of a built-in."""


@pytest.mark.parametrize("deaf", [lambda loss: None, 5, object(), "no_such_hook", print])
def test_what_hears_nothing_is_refused(deaf: Any) -> None:
    """A function without its event, or an object without event methods, would be silently ignored."""
    with pytest.raises(HooklineError, match=r"listens to no event|no hook named"):
        HookRegistry().register(deaf)


def test_a_misspelt_option_of_a_function_is_refused() -> None:
    """`evry=10` must not become a hook that is always due."""
    with pytest.raises(RegistrationError, match="'evry' is no option of a hook; did you mean 'every'"):
        HookRegistry().on("train_batch_end", evry=10)(lambda: None)
    with pytest.raises(RegistrationError, match="is no event"):
        HookRegistry().on("train_bach_end")(lambda: None)


def test_what_is_not_said_comes_from_the_hook() -> None:
    """Schedule and policy of its own count unless the call gives others."""
    registry = HookRegistry()
    registry.register(Ours(), "as it is")
    registry.register(Ours(), "as told", every=3, on_error="warn")
    as_it_is, as_told = (registry.entry(name) for name in registry)
    assert (str(as_it_is.schedule), as_it_is.policy) == ("every 7 steps", "raise")
    assert (str(as_told.schedule), as_told.policy) == ("every 3 steps", "warn")


def test_a_subclass_is_not_built_in() -> None:
    """What the project says of its own classes is not inherited: where it comes from, and that it runs last."""
    registry = HookRegistry()
    registry.register(Ours)
    registry.register(Theirs)
    ours, theirs = registry.entry("ours"), registry.entry("theirs")
    assert (ours.built_in, ours.last, ours.origin) == (True, True, "built-in")
    assert (theirs.built_in, theirs.last, theirs.origin) == (False, False, "code")


@pytest.mark.parametrize(
    ("ranks", "kept"), [(None, None), (0, frozenset({0})), ([1, 2], frozenset({1, 2})), (range(2), frozenset({0, 1}))]
)
def test_one_rank_or_several(ranks: Any, kept: Any) -> None:
    """Ranks are a number or any collection of them."""
    registry = HookRegistry()
    registry.register(Ours(), "a", ranks=ranks, before="b", after=["c", "d"])
    entry = registry.entry("a")
    assert (entry.ranks, entry.before, entry.after) == (kept, ("b",), ("c", "d"))


def test_a_wrong_policy_lists_the_right_ones() -> None:
    """A misspelt policy is refused at registration."""
    with pytest.raises(ConfigError, match="'wran' is no failure policy; did you mean 'warn'"):
        HookRegistry().register(Ours(), on_error="wran")


def test_a_wrong_schedule_is_told_of_the_function() -> None:
    """The message begins with the name that the function would go by."""

    def report(loss: float) -> None: ...

    with pytest.raises(ConfigError, match=r"^report\.every: 'bananas' is no unit"):
        HookRegistry().register(report, event="train_batch_end", every="10 bananas")


@pytest.mark.parametrize(("kind", "method"), [(ForwardHook, "on_forward"), (UpdateHook, "on_update")])
def test_a_hook_without_what_its_kind_is_for_is_refused(kind: type, method: str) -> None:
    """A method of another name would never be called."""
    misnamed = type("Misnamed", (kind,), {"update": lambda self, grads: grads, "on_step_end": lambda self: None})
    with pytest.raises(HooklineError, match=f"'Misnamed' is a {kind.__name__} without a method '{method}'"):
        HookRegistry().register(misnamed())
