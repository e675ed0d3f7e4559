"""What hooks can name at one moment of a run: every argument is an attribute of the moment.

The training loop has a moment of its own with lazily computed attributes; this one holds the values of an event that
somebody fired by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hookline.errors import MissingArgument
from hookline.events.catalog import Event


class HandMoment:
    """The values of an event fired by hand. What a hook names and the call did not pass is the caller's error."""

    def __init__(self, event: Event, values: Mapping[str, Any], who_names: Callable[[str], list[str]]) -> None:
        known = {name: value for name, value in values.items() if name in event.attributes}
        self.__dict__.update({event.attributes[name]: value for name, value in known.items()})
        for spelling in event.respelled.values():
            self.__dict__.update({spelling[name]: values[name] for name in spelling if name in values})
        self._event = event
        self._who_names = who_names

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        named = next((key for key, source in self._event.attributes.items() if source == name), name)
        hooks = ", ".join(repr(hook) for hook in self._who_names(name)) or "a hook"
        raise MissingArgument(
            f"{self._event.name}: {hooks} names {named!r}, which the call did not pass; pass {named}=… when you fire it"
        )


def known(moment: Any, name: str, default: Any) -> Any:
    """A value of the moment, for a report; the default when the event was fired by hand without it."""
    return vars(moment).get(name, default) if isinstance(moment, HandMoment) else getattr(moment, name, default)


def known_step(moment: Any) -> int:
    """The step, for a report; 0 when the event was fired by hand without one."""
    return int(known(moment, "step", 0))
