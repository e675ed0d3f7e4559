"""Checking what a built-in hook's constructor was given: the parameter, the bad value, and what would be right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hookline.errors import ConfigError, nearest


def one_of(value: Any, choices: Sequence[str], name: str) -> str:
    """A word out of a few."""
    if value not in choices:
        raise ConfigError(name, f"{value!r} is no choice; {nearest(str(value), choices)}")
    return str(value)


def whole_number(value: Any, name: str, smallest: int = 1) -> int:
    """A whole number that is large enough; True is none, though Python thinks so."""
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise ConfigError(name, f"expected a whole number, at least {smallest}; got {value!r}")
    return value


def whole_number_or_none(value: Any, name: str, smallest: int = 1) -> int | None:
    """The same, where null means never."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < smallest):
        raise ConfigError(name, f"expected a whole number, at least {smallest}, or null for never; got {value!r}")
    return value


def switch(value: Any, name: str) -> bool:
    """True or false; a word such as "no" would count as true."""
    if not isinstance(value, bool):
        raise ConfigError(name, f"expected true or false; got {value!r}")
    return value


def text(value: Any, name: str) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ConfigError(name, f"expected a text that is not empty; got {value!r}")
    return value


def text_or_none(value: Any, name: str) -> str | None:
    """The same, where null means that there is none."""
    return None if value is None else text(value, name)


def number(value: Any, name: str, smallest: float = -math.inf, largest: float = math.inf) -> float:
    """A finite number between two bounds, both included."""
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    if plain and math.isfinite(value) and smallest <= value <= largest:
        return float(value)
    least = f", at least {smallest:g}" if math.isfinite(smallest) else ""
    most = f", at most {largest:g}" if math.isfinite(largest) else ""
    raise ConfigError(name, f"expected a number{least}{most}; got {value!r}")


def number_or_none(value: Any, name: str, smallest: float = -math.inf) -> float | None:
    """The same, where null means that there is no such limit."""
    return None if value is None else number(value, name, smallest)
