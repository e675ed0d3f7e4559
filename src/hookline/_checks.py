"""Check parameters of functions and options: every error names the parameter, the bad value and what would be right.

Each function returns the checked value, so that a constructor can check and assign in one line. Hooks need none of
these: their base class checks them against their annotations (`_parameters`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from operator import ge, gt, le
from typing import Any, TypeVar

from hookline._words import nearest
from hookline.errors import ConfigError, got

Checked = TypeVar("Checked")


def one_of(value: Any, choices: Sequence[str], name: str) -> str:
    """Check a string that must be one of a few."""
    if value not in choices:
        raise ConfigError(name, f"invalid value {value!r}; {nearest(str(value), choices)}")
    return str(value)


def boolean(value: Any, name: str) -> bool:
    """Check a bool; the string "no" would count as true."""
    if not isinstance(value, bool):
        raise ConfigError(name, f"expected true or false, {got(value)}")
    return value


def names(value: Any, name: str) -> tuple[str, ...]:
    """Check several names; one name may be given as it is, without a list around it."""
    items = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (None,)
    if not all(isinstance(item, str) for item in items):
        raise ConfigError(name, f"expected a name or a list of names, {got(value)}")
    return items


def integer(value: Any, name: str, at_least: int | None = None) -> int:
    """Check an int; bools are rejected although Python counts them as ints."""
    if isinstance(value, bool) or not isinstance(value, Integral) or (at_least is not None and value < at_least):
        bound = "" if at_least is None else f" of at least {at_least}"
        raise ConfigError(name, f"expected an integer{bound}, {got(value)}")
    return int(value)


def number(
    value: Any, name: str, *, at_least: float | None = None, above: float | None = None, at_most: float | None = None
) -> float:
    """Check a finite number within bounds; NumPy scalars are accepted, bools are not.

    Args:
        value: The value that was given.
        name: The parameter's name or dotted path, for the message.
        at_least: The smallest valid value.
        above: A bound that the value must exceed.
        at_most: The largest valid value.

    Returns:
        The value: an int stays an int, everything else becomes a float.

    Raises:
        ConfigError: If it is not a number or is out of bounds.
    """
    given = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    bounds = (("at least", at_least, ge), ("above", above, gt), ("at most", at_most, le))
    present = [(word, bound, holds) for word, bound, holds in bounds if bound is not None]
    if math.isfinite(given) and all(holds(given, bound) for _, bound, holds in present):
        return float(value) if not isinstance(value, int) else value
    limits = " and ".join(f"{word} {bound:g}" for word, bound, _ in present)
    raise ConfigError(name, f"expected a finite number{', ' + limits if limits else ''}, {got(value)}")


def optional(check: Callable[..., Checked], value: Any, name: str, **bounds: Any) -> Checked | None:
    """Apply another check unless the value is None."""
    return None if value is None else check(value, name, **bounds)
