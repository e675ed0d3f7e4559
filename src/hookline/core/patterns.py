"""Select modules and parameters by pattern.

A pattern is an exact name, a glob (``*`` matches dots too), ``"re:…"`` (matches the whole name), a class or
``"class:…"`` (its name), a predicate ``(name, thing) -> bool``, the thing itself, or a list of these. A pattern that
matches nothing raises `HooklineError`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from hookline._words import nearest
from hookline.errors import HooklineError

Thing = TypeVar("Thing")


def select(pattern: Any, things: Mapping[str, Thing], what: str) -> dict[str, Thing]:
    """Return the named things that a pattern selects.

    Args:
        pattern: An exact name, a glob, ``"re:…"``, a class, ``"class:…"``, a predicate, the thing itself, or a list.
        things: The things to select from, by name.
        what: The noun for the things in error messages.

    Returns:
        The selected things, in the order of `things`.

    Raises:
        HooklineError: If a pattern matches nothing.
    """
    patterns = pattern if isinstance(pattern, (list, tuple, set, frozenset)) else [pattern]
    chosen: set[str] = set()
    for pattern in patterns:
        matches = _matcher(pattern, what)
        matching = {name for name, thing in things.items() if matches(name, thing)}
        if not matching and pattern == "*":
            matching = set(things)  # A model that is a single module has only its root.
        if not matching:
            shown = repr(pattern) if isinstance(pattern, str) else getattr(pattern, "__name__", type(pattern).__name__)
            raise HooklineError(f"{what} pattern {shown} matches nothing; {_choices(pattern, things)}")
        chosen |= matching
    return {name: thing for name, thing in things.items() if name in chosen}


def _matcher(pattern: Any, what: str) -> Callable[[str, Any], bool]:
    if isinstance(pattern, str) and pattern.startswith("re:"):
        try:
            regex = re.compile(pattern[3:])
        except re.error as error:
            raise HooklineError(f"{what} pattern {pattern!r} is not a regular expression: {error}") from error
        return lambda name, thing: regex.fullmatch(name) is not None
    if isinstance(pattern, str) and pattern.startswith("class:"):
        return lambda name, thing: any(cls.__name__ == pattern[6:] for cls in type(thing).__mro__)
    if isinstance(pattern, str):
        # The root of a model has no name, so that only an empty pattern selects it.
        return lambda name, thing: name == pattern or (name != "" and fnmatchcase(name, pattern))
    if isinstance(pattern, type):
        return lambda name, thing: isinstance(thing, pattern)
    if callable(pattern) and not hasattr(pattern, "named_parameters"):
        return lambda name, thing: bool(pattern(name, thing))
    return lambda name, thing: thing is pattern


def _choices(pattern: Any, things: Mapping[str, Any]) -> str:
    """List the nearest alternatives: names, or for a class the classes."""
    if isinstance(pattern, type) or str(pattern).startswith("class:"):
        wanted = pattern.__name__ if isinstance(pattern, type) else pattern[6:]
        return nearest(wanted, {type(thing).__name__ for thing in things.values()})
    if pattern in {type(thing).__name__ for thing in things.values()}:
        return f"did you mean 'class:{pattern}'?"
    return nearest(str(pattern), [name for name in things if name])
