"""Read which event arguments a hook's method names, once, when the hook is registered.

`read_signature` turns a method into a `Listener`: a callable and the attributes of the event arguments to call it with.
Dispatch then makes direct calls; nothing is looked up when an event fires.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from itertools import takewhile
from typing import Any

from hookline.core.catalog import ARGUMENT_ALIASES, ARGUMENTS, Event
from hookline.errors import RegistrationError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Listener:
    """A hook's method for one event, with the arguments it names."""

    call: Callable[..., Any]
    positional: tuple[str, ...]  # Attributes of the event arguments, in the order of the call.
    keywords: Mapping[str, str]  # Parameter -> attribute of the event arguments.
    names: tuple[str, ...] = ()  # The parameters of the positional ones; "" for one that cannot come by keyword.
    required: frozenset[str] = frozenset()  # Attributes without a default, which do not come through **kwargs either.

    @cached_property
    def wanted(self) -> tuple[str, ...]:
        """The attributes of the event arguments that it needs, each once."""
        return tuple(dict.fromkeys((*self.positional, *self.keywords.values())))

    def arguments(self, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of the hook, by position and by keyword; missing ones keep their defaults."""
        try:
            positional = list(map(values.__getitem__, self.positional))
            if not self.keywords:  # This is the case for most hooks.
                return positional, {}
            return positional, {parameter: values[name] for parameter, name in self.keywords.items()}
        except KeyError:  # Fired by hand. After a parameter that keeps its default, the others come by keyword.
            given = list(takewhile(values.__contains__, self.positional))
            keywords = {**dict(zip(self.names, self.positional, strict=True)), **self.keywords}
            for name in ("", *self.names[: len(given)]):
                keywords.pop(name, None)
            by_name = {parameter: values[name] for parameter, name in keywords.items() if name in values}
            return [values[name] for name in given], by_name


def read_signature(call: Callable[..., Any], event: Event, spelling: str, owner: str) -> Listener:
    """Read which arguments of an event a callable names.

    Args:
        call: A hook's method, or a function.
        event: The event it listens to.
        spelling: The event's name as the hook spells it.
        owner: The hook's class or the function's name, for messages.

    Returns:
        The listener.

    Raises:
        RegistrationError: If it names an argument that the event does not have; the message suggests the nearest name.
    """
    where = f"{owner}.{spelling}" if getattr(call, "__name__", "") == spelling else f"{owner} ({spelling})"
    _reject_deferred(call, where)
    positional: list[str] = []
    names: list[str] = []
    keywords: dict[str, str] = {}
    required: set[str] = set()
    in_order = True  # After a positional parameter that keeps its default, the later ones are passed by keyword.
    try:
        parameters = list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError) as error:
        raise RegistrationError(f"{where}: its signature cannot be read ({error}); wrap it in a def") from error
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:  # Receives all other free arguments.
            taken = {*positional, *keywords.values()}
            free = {name: event.attribute(name, spelling) for name in event.attributes if event.free(name)}
            keywords.update({name: source for name, source in free.items() if source and source not in taken})
            continue
        attribute = _attribute(parameter, event, spelling, where)
        if attribute is not None and parameter.default is inspect.Parameter.empty:
            required.add(attribute)
        if attribute is None:
            in_order = False
        elif parameter.kind in _POSITIONAL and in_order:
            positional.append(attribute)
            names.append("" if parameter.kind is inspect.Parameter.POSITIONAL_ONLY else parameter.name)
        elif parameter.kind is not inspect.Parameter.POSITIONAL_ONLY:  # Out of order, they keep their defaults.
            keywords[parameter.name] = attribute
    return Listener(call, tuple(positional), keywords, tuple(names), frozenset(required))


def _attribute(parameter: inspect.Parameter, event: Event, spelling: str, where: str) -> str | None:
    """Return the attribute for one parameter; None if it keeps its default."""
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        raise RegistrationError(
            f"{where}: *{parameter.name} is refused, because arguments come by name; name what you need, such as "
            f"{', '.join(event.order)}; `hookline events --event {event.name}` lists all"
        )
    attribute = event.attribute(parameter.name, spelling)
    if attribute is None and parameter.default is inspect.Parameter.empty:
        raise RegistrationError(f"{where}: {event.unknown_argument(parameter.name)}")
    # Any other default is a value that the function brings along, as in `lambda step, steps=steps: …`.
    if attribute is None and parameter.default is None and parameter.name not in (*ARGUMENTS, *ARGUMENT_ALIASES):
        misspelt = get_close_matches(parameter.name, event.argument_names, 1, 0.75)
        if misspelt:
            problem = f"{event.name} has no argument {parameter.name!r}, so it would always be None"
            raise RegistrationError(f"{where}: {problem}; did you mean {misspelt[0]!r}?")
    return attribute


def _reject_deferred(call: Callable[..., Any], where: str) -> None:
    bodies = (call, getattr(call, "__call__", call))  # noqa: B004 - The body of an object is its __call__.
    if any(inspect.iscoroutinefunction(body) or inspect.isasyncgenfunction(body) for body in bodies):
        raise RegistrationError(f"{where}: async def is refused, because nothing would await it; use a plain def")
    if any(inspect.isgeneratorfunction(body) for body in bodies):
        raise RegistrationError(f"{where}: a generator is refused, because its body would never run; drop the yield")
