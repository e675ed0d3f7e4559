"""Arguments by name: what a hook's signature asks for, read once at registration.

`read_signature` is the only function in the project that reads signatures. It turns a method into a `Listener`: a
callable and the moment's attributes to call it with. Dispatch then makes direct calls; nothing is looked up at firing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hookline.core.catalog import ARGUMENT_ALIASES, Event
from hookline.errors import RegistrationError, nearest

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Listener:
    """One method of one hook, ready to be called at one event."""

    event: Event
    spelling: str
    call: Callable[..., Any]
    positional: tuple[str, ...]  # attributes of the moment, in the order of the call
    keywords: Mapping[str, str]  # parameter -> attribute of the moment
    optional: frozenset[str] = frozenset()  # attributes it can do without: it has a default, or takes **kwargs

    @property
    def wanted(self) -> tuple[str, ...]:
        """The moment's attributes this listener needs, each once."""
        return tuple(dict.fromkeys((*self.positional, *self.keywords.values())))

    def __call__(self, moment: Any) -> Any:
        """Call the hook with what it named (the slow way; hot events use generated code instead)."""
        return self.with_values({name: getattr(moment, name) for name in self.wanted})

    def without(self, missing: Iterable[str]) -> Listener:
        """The same listener where these values are not to be had: what is optional keeps its default."""
        gone = self.optional & set(missing)
        resolved = {name: self.event.attribute(name, self.spelling) or name for name in self.event.attributes}
        left = {name: source for name, source in resolved.items() if source not in gone}
        again = read_signature(self.call, replace(self.event, attributes=left, respelled={}), self.spelling, "")
        return replace(self, positional=again.positional, keywords=again.keywords)

    def with_values(self, values: Mapping[str, Any]) -> Any:
        """Call the hook with values that were read already."""
        positional, keywords = self.arguments(values)
        return self.call(*positional, **keywords)

    def arguments(self, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return what the hook is called with, by position and by keyword."""
        keywords = {parameter: values[name] for parameter, name in self.keywords.items()}
        return [values[name] for name in self.positional], keywords


def read_signature(call: Callable[..., Any], event: Event, spelling: str, owner: str) -> Listener:
    """Read which arguments `call` names; refuse what the event does not have, with the nearest right name."""
    where = f"{owner}.{spelling}" if getattr(call, "__name__", "") == spelling else f"{owner} ({spelling})"
    _refuse_deferred(call, where)
    positional: list[str] = []
    keywords: dict[str, str] = {}
    required: set[str] = set()
    in_order = True  # a positional parameter left at its default sends the later ones by keyword
    for parameter in _parameters(call, where):
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            keywords.update(_free_arguments(event, spelling, {*positional, *keywords.values()}))
            continue
        attribute = _attribute(parameter, event, spelling, where)
        if attribute is not None and parameter.default is inspect.Parameter.empty:
            required.add(attribute)
        if attribute is None:
            in_order = False
        elif parameter.kind in _POSITIONAL and in_order:
            positional.append(attribute)
        elif parameter.kind is not inspect.Parameter.POSITIONAL_ONLY:  # out of order, such a one keeps its default
            keywords[parameter.name] = attribute
    optional = frozenset({*positional, *keywords.values()} - required)
    return Listener(event, spelling, call, tuple(positional), keywords, optional)


def _parameters(call: Callable[..., Any], where: str) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError) as error:
        raise RegistrationError(f"{where}: its signature cannot be read ({error}); wrap it in a def") from error


def _attribute(parameter: inspect.Parameter, event: Event, spelling: str, where: str) -> str | None:
    """The moment's attribute for one parameter; None when it keeps its default."""
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        raise RegistrationError(
            f"{where}: *{parameter.name} is refused, because arguments come by name; name what you need: "
            f"{', '.join(event.argument_names)}"
        )
    attribute = event.attribute(parameter.name, spelling)
    if attribute is None and parameter.default is inspect.Parameter.empty:
        raise RegistrationError(
            f"{where}: {event.name} has no argument {parameter.name!r}; "
            f"{nearest(parameter.name, event.argument_names, 40)}"
        )
    return attribute


def _free_arguments(event: Event, spelling: str, taken: set[str]) -> dict[str, str]:
    """What `**kwargs` receives: the values that cost nothing and are not named already."""
    free = {}
    for name in event.attributes:
        attribute = event.attribute(name, spelling)
        if attribute is not None and event.free(name) and attribute not in taken:
            free[name] = attribute
    return free


def _refuse_deferred(call: Callable[..., Any], where: str) -> None:
    bodies = (call, getattr(call, "__call__", call))  # noqa: B004 - an object's body is its __call__
    if any(inspect.iscoroutinefunction(body) or inspect.isasyncgenfunction(body) for body in bodies):
        raise RegistrationError(f"{where}: async def is refused, because nothing would await it; use a plain def")
    if any(inspect.isgeneratorfunction(body) for body in bodies):
        raise RegistrationError(f"{where}: a generator is refused, because its body would never run; drop the yield")


def by_hand(event: Event, order: tuple[str, ...], args: tuple[Any, ...], values: dict[str, Any]) -> dict[str, Any]:
    """The values of an event fired by hand: positional ones get their names, `ctx` and `state` are taken apart."""
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
    return {**_taken_apart(named), **named}


_STATE_KEYS = {
    "model": "model",
    "optimizer": "optimizer",
    "device": "device",
    "epoch": "current_epoch",
    "batch_idx": "current_batch_idx",
    "loss": "latest_loss",
}
_CTX_FIELDS = ("step", "loss", "grad_norm", "lr", "tokens_seen", "model", "optimizer")


def _taken_apart(named: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    state, ctx = named.get("state"), named.get("ctx")
    if isinstance(state, Mapping):
        found.update({name: state[key] for name, key in _STATE_KEYS.items() if key in state})
    if ctx is not None:
        found.update({name: getattr(ctx, name) for name in _CTX_FIELDS if hasattr(ctx, name)})
    if "loss" in named and "metrics" not in named:
        found["metrics"] = {"loss": named["loss"]}
    return found
