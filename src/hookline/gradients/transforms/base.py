"""What the ready links share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hookline.errors import GradientError, HooklineError
from hookline.gradients.numbers import are_plain, is_sharded, numbers_of
from hookline.gradients.view import Gradients
from hookline.registry.base import UpdateHook


class Transform(UpdateHook):
    """A ready link. Most of them write into the gradients they get.

    A run in which a transform is left out is another run, so a failure here ends it; `on_error` says otherwise.
    """

    inplace = True
    on_error = "raise"

    def __init__(self, params: Any = None) -> None:
        self.params = params


def above_zero(link: str, **given: float) -> None:
    """Refuse numbers that are not above zero, when the link is made."""
    for key, value in given.items():
        if not value > 0:
            raise HooklineError(f"{link}: {key} must be above 0, got {value!r}")


def at_least_zero(link: str, **given: float) -> None:
    """Refuse negative numbers and nan, when the link is made."""
    for key, value in given.items():
        if not value >= 0:
            raise HooklineError(f"{link}: {key} must be at least 0, got {value!r}")


def below_one(link: str, **given: float) -> None:
    """Refuse what is no share of a whole, when the link is made."""
    for key, value in given.items():
        if not 0 <= value < 1:
            raise HooklineError(f"{link}: {key} must be at least 0 and below 1, got {value!r}")


def whole_rows(link: str, grads: Gradients) -> list[Tensor]:
    """The gradients' memory for a link that computes along rows; refuses those that have no whole row here."""
    tensors = grads.tensors()
    if are_plain(tensors):
        return tensors
    for name, tensor in grads.items():
        if is_sharded(tensor) and any(place.is_shard() and place.dim for place in tensor.placements):  # type: ignore[attr-defined]
            raise GradientError(f"{link}: {name!r} is sharded within its rows; {_LEAVE_OUT}")
    return dense(link, grads)


def dense(link: str, grads: Gradients) -> list[Tensor]:
    """The gradients' memory for a link that does not leave zeros zero; refuses sparse gradients by name."""
    tensors = grads.tensors()
    if are_plain(tensors):
        return tensors
    for name, tensor in grads.items():
        if tensor.is_sparse:
            raise GradientError(f"{link}: the gradient of {name!r} is sparse; {_LEAVE_OUT}")
    return numbers_of(tensors)


_LEAVE_OUT = "leave it out with params= (a list of patterns, or a predicate)"
