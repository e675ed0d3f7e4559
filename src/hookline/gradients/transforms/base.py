"""What the ready links share."""

from __future__ import annotations

from math import inf, isfinite
from numbers import Real
from typing import Any

from torch import Tensor

from hookline.errors import GradientError, HooklineError
from hookline.gradients.numbers import is_sharded, numbers_of
from hookline.gradients.view import Gradients
from hookline.registry.base import UpdateHook


class Transform(UpdateHook):
    """A ready link. Most of them write into the gradients they get.

    A run in which a transform is left out is another run, so a failure here ends it; `on_error` says otherwise. One
    that `tells_norms` says what its writing makes of the norms (`grads.known`), or settles them before it writes.
    """

    inplace = True
    on_error = "raise"
    tells_norms = False

    def __init__(self, params: Any = None) -> None:
        self.params = params


def above_zero(link: str, **given: float) -> None:
    """Refuse numbers that are not above zero, when the link is made."""
    for key, value in given.items():
        if not (_is_number(value) and value > 0):
            raise HooklineError(f"{link}: {key} must be above 0, got {value!r}")


def above_one(link: str, **given: float) -> None:
    """Refuse factors that would not enlarge, when the link is made."""
    for key, value in given.items():
        if not (_is_number(value) and value > 1):
            raise HooklineError(f"{link}: {key} must be above 1, got {value!r}")


def at_least_zero(link: str, **given: float) -> None:
    """Refuse negative and endless numbers and nan, when the link is made."""
    for key, value in given.items():
        if not (_is_number(value) and 0 <= value < inf):
            raise HooklineError(f"{link}: {key} must be at least 0 and finite, got {value!r}")


def finite(link: str, **given: float) -> None:
    """Refuse endless numbers and nan, when the link is made: no gradient would be finite behind it."""
    for key, value in given.items():
        if not (_is_number(value) and isfinite(value)):
            raise HooklineError(f"{link}: {key} must be a finite number, got {value!r}")


def below_one(link: str, **given: float) -> None:
    """Refuse what is no share of a whole, when the link is made."""
    for key, value in given.items():
        if not (_is_number(value) and 0 <= value < 1):
            raise HooklineError(f"{link}: {key} must be at least 0 and below 1, got {value!r}")


def whole_from_one(link: str, **given: float) -> None:
    """Refuse what counts nothing: parts of one, zero, and what is no number."""
    for key, value in given.items():
        if not (_is_number(value) and value >= 1 and float(value).is_integer()):
            raise HooklineError(f"{link}: {key} must be a whole number above 0, got {value!r}")


def seed_or_none(link: str, seed: int | None) -> None:
    """Refuse what no random stream can begin with, when the link is made."""
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise HooklineError(f"{link}: seed must be a whole number, or None for the run's, got {seed!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)  # NumPy's, too


def whole_rows(link: str, grads: Gradients) -> list[Tensor]:
    """The gradients' memory for a link that computes along rows; refuses those that have no whole row here."""
    look = grads.look()
    if look.plain:
        return look.tensors
    for name, tensor in grads.items():
        if is_sharded(tensor) and any(place.is_shard() and place.dim for place in tensor.placements):  # type: ignore[attr-defined]
            raise GradientError(f"{link}: {name!r} is sharded within its rows; {_LEAVE_OUT}")
    return dense(link, grads)


def dense(link: str, grads: Gradients) -> list[Tensor]:
    """The gradients' memory for a link that does not leave zeros zero; refuses sparse and complex ones by name."""
    look = grads.look()
    if look.plain:
        return look.tensors
    for name, tensor in grads.items():
        if tensor.is_sparse:
            raise GradientError(f"{link}: the gradient of {name!r} is sparse; {_LEAVE_OUT}")
        if tensor.is_complex():
            raise GradientError(f"{link}: the gradient of {name!r} is complex; {_LEAVE_OUT}")
    return numbers_of(look.tensors)


_LEAVE_OUT = "leave it out with params= (a list of patterns, or a predicate)"
