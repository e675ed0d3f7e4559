"""Fire events from a user's own loop: ``registry.on_epoch_end(epoch, state)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hookline.core.catalog import ARGUMENT_ALIASES, Event
from hookline.core.dispatch import Dispatch, needed_arguments
from hookline.core.due_hooks import ManualClock
from hookline.errors import MissingArgument, nearest

if TYPE_CHECKING:
    from hookline.core.registry import HookRegistry

STATE_KEYS = {
    "model": "model",
    "optimizer": "optimizer",
    "device": "device",
    "epoch": "current_epoch",
    "batch_idx": "current_batch_idx",
    "loss": "latest_loss",
}
"""Arguments that are read from `state` if it is passed."""
CTX_FIELDS = ("step", "loss", "grad_norm", "lr", "tokens_seen", "model", "optimizer")


class ManualArgs:
    """The arguments of a manually fired event; naming one that the call did not pass is the caller's error."""

    def __init__(self, event: Event, values: Mapping[str, Any], hooks_naming: Callable[[str], list[str]]) -> None:
        known = {name: value for name, value in values.items() if name in event.attributes}
        self.__dict__.update({event.attributes[name]: value for name, value in known.items()})
        for sources in event.respelled.values():
            self.__dict__.update({sources[name]: values[name] for name in sources if name in values})
        self._event = event
        self._hooks_naming = hooks_naming

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        named = next((key for key, source in self._event.attributes.items() if source == name), name)
        hooks = ", ".join(repr(hook) for hook in self._hooks_naming(name)) or "a hook"
        raise MissingArgument(
            f"{self._event.name}: {hooks} names {named!r}, which the call did not pass; pass {named}=… when you fire it"
        )


def name_values(event: Event, order: tuple[str, ...], args: tuple[Any, ...], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a manually fired event by name.

    Args:
        event: The event.
        order: The names of values that are passed by position.
        args: Values that were passed by position.
        values: Values that were passed by name.

    Returns:
        All values, with those that `ctx` and `state` contain.

    Raises:
        TypeError: If there are too many values, one is given twice, or the event has no such argument.
    """
    if len(args) > len(order):
        raise TypeError(f"{event.name} takes {len(order)} values by position ({', '.join(order)}), got {len(args)}")
    for name, value in zip(order, args, strict=False):
        if name in values:
            raise TypeError(f"{event.name} got {name!r} twice")
        values[name] = value
    unknown = [name for name in values if ARGUMENT_ALIASES.get(name, name) not in event.attributes]
    if unknown:
        raise TypeError(f"{event.name} has no argument {unknown[0]!r}; {nearest(unknown[0], event.argument_names, 40)}")
    named = {ARGUMENT_ALIASES.get(name, name): value for name, value in values.items()}
    contained: dict[str, Any] = {}
    state, ctx = named.get("state"), named.get("ctx")
    if isinstance(state, Mapping):
        contained.update({name: state[key] for name, key in STATE_KEYS.items() if key in state})
    if ctx is not None:
        contained.update({name: getattr(ctx, name) for name in CTX_FIELDS if hasattr(ctx, name)})
    if "loss" in named and "metrics" not in named:
        contained["metrics"] = {"loss": named["loss"]}
    return {**contained, **named}


class ManualFiring:
    """Fires events of a registry with values that a user's own loop passes; schedules count by those values."""

    def __init__(self, registry: HookRegistry) -> None:
        self._registry, self._table = registry, registry.dispatch_table
        self._clock = ManualClock()
        self._reduced: dict[tuple[str, frozenset[str], frozenset[str], bool], Dispatch | None] = {}

    def reset(self) -> None:
        """Forget all callables, because the hooks have changed."""
        self._reduced = {}

    def fire(self, event: Event, order: tuple[str, ...], args: tuple[Any, ...], values: dict[str, Any]) -> None:
        """Fire one event with what the caller passed; `name_values` has the Args."""
        registry = self._registry
        named = name_values(event, order, args, values)
        self._clock.read(named)
        if event.inner and self._clock.advanced():
            # Steps of a user's loop need not be consecutive, so that schedules cannot be counted down.
            (registry.decide_due_hooks if registry.has_schedules else registry.begin_batch)(self._clock.now)
        dispatch = getattr(registry.slots, event.name)
        if not dispatch:
            return
        event_args = ManualArgs(event, named, partial(self._hooks_naming, event))
        if registry.has_optional_arguments and event.name not in self._table.compilers:
            dispatch = self._without_missing(event, frozenset(vars(event_args)))
        if dispatch:
            dispatch(event_args)

    def _without_missing(self, event: Event, passed: frozenset[str]) -> Dispatch | None:
        """Return the callable for a call that passed only these values: hooks keep their defaults for the rest."""
        scheduler = self._table.scheduler
        due = scheduler.due_for(event)
        key = (event.name, passed, due, scheduler.timed)
        if key not in self._reduced:
            hooks = self._registry.listeners(event, due)
            missing = set(needed_arguments(hooks)) - passed
            reduced = [replace(hook, listener=hook.listener.without(missing)) for hook in hooks]
            self._reduced[key] = self._table.compile(event, reduced)
        return self._reduced[key]

    def _hooks_naming(self, event: Event, attribute: str) -> list[str]:
        hooks = self._registry.listeners(event, self._table.scheduler.due_for(event))
        return [hook.hook for hook in hooks if attribute in hook.listener.wanted]
