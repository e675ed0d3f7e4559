"""Check names and choices that a caller gives; an error has the nearest valid choice.

Numbers, bools and everything else that an annotation can say are checked by `_parameters.check`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import Any

from hookline._words import nearest
from hookline.errors import ConfigError, got

MADE_FROM_FILE: ContextVar[bool] = ContextVar("MADE_FROM_FILE", default=False)
"""Whether the hook being created gets its parameters from a config file, which may come from someone else."""


def one_of(value: Any, choices: Sequence[str], name: str) -> str:
    """Check a string that must be one of a few."""
    if value not in choices:
        raise ConfigError(name, f"invalid value {value!r}; {nearest(str(value), choices)}")
    return str(value)


def names(value: Any, name: str) -> tuple[str, ...]:
    """Check several names; one name may be given as it is, without a list around it."""
    items = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (None,)
    if not all(isinstance(item, str) for item in items):
        raise ConfigError(name, f"expected a name or a list of names, {got(value)}")
    return items
