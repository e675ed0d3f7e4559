"""From what somebody registers to an entry: the hook made, its methods read, its options checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hookline.errors import RegistrationError, nearest
from hookline.events.arguments import Listener
from hookline.events.catalog import Events, find_event
from hookline.events.policy import check_policy
from hookline.events.schedule import Schedule
from hookline.registry.base import ForwardHook, UpdateHook
from hookline.registry.entry import Entry, default_name, find_listeners, function_hook
from hookline.registry.loading import OPTIONS, hook_parameters, make_hook

MAIN_EVENTS: dict[type, str] = {ForwardHook: "on_forward", UpdateHook: "on_update"}  # what a kind of hook is for


def make_entry(
    hook: Any,
    name: str | None,
    event: str | None,
    parameters: Mapping[str, Any],
    *,
    schedule: Schedule,
    on_error: str | None,
    before: str | Iterable[str],
    after: str | Iterable[str],
    ranks: int | Iterable[int] | None,
    origin: str,
    enabled: bool,
    last: bool,
) -> Entry:
    """An entry that has no number yet; what is not given comes from the hook's class."""
    made, listeners = _function(hook, event, parameters) if event else _object(hook, parameters)
    ours = vars(type(made))  # a subclass that a user writes is not built in
    built_in = bool(ours.get("built_in", False))
    return Entry(
        name=name or (str(getattr(made, "__name__", "function")) if event else default_name(made)),
        hook=made,
        number=0,
        listeners=listeners,
        built_in=built_in,
        policy=check_policy(on_error or str(getattr(made, "on_error", "warn"))),
        schedule=(getattr(made, "schedule", None) or schedule) if schedule == Schedule() else schedule,
        enabled=enabled,
        last=last or bool(ours.get("runs_last", False)),
        before=names_of(before),
        after=names_of(after),
        ranks=_ranks(ranks),
        origin="built-in" if built_in and origin == "code" else origin,
        parameters={} if event else hook_parameters(made, parameters),
    )


def names_of(value: str | Iterable[str]) -> tuple[str, ...]:
    """One name or several, as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value)


def _ranks(value: int | Iterable[int] | None) -> frozenset[int] | None:
    if value is None:
        return None
    return frozenset((value,)) if isinstance(value, int) else frozenset(value)


def _function(function: Any, event: str, unknown: Mapping[str, Any]) -> tuple[Any, dict[str, Listener]]:
    """A plain function has no constructor: what is left over is a misspelt option."""
    for key in unknown:
        raise RegistrationError(f"{key!r} is no option of a hook; {nearest(key, OPTIONS)}")
    return function, function_hook(function, find_event(event), event if event.startswith("on_") else f"on_{event}")


def _object(hook: Any, parameters: Mapping[str, Any]) -> tuple[Any, dict[str, Listener]]:
    """One that hears nothing and is not even meant as a hook, or not what its kind is for, is somebody's slip."""
    made = make_hook(hook, parameters)
    listeners = find_listeners(made)
    if not listeners and not isinstance(made, Events):
        raise RegistrationError(
            f"{getattr(made, '__name__', type(made).__name__)!r} hears no event: give a function its event (event=…), "
            "or a class a method named after one"
        )
    for kind, method in MAIN_EVENTS.items():
        if isinstance(made, kind) and method not in listeners:
            raise RegistrationError(f"{type(made).__name__!r}, of the kind {kind.__name__}, has no method {method!r}")
    return made, listeners
