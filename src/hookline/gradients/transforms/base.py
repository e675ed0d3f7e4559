"""`Transform`, the base of built-in update hooks that change gradients, and how they get at dense gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline._tensors import is_sharded, kind_of
from hookline.core.base import UpdateHook
from hookline.errors import GradientError
from hookline.gradients.view import Gradients

_LEAVE_OUT = "leave it out with params= (a list of patterns, or a predicate)"


class Transform(UpdateHook):
    """A built-in update hook; most of them write into the gradients they get.

    A run without one of its transforms would be another run, so a failure ends it unless `on_error` says otherwise.
    """

    inplace = True
    on_error = "raise"

    def __init__(self, params: Any = None) -> None:
        self.params = params


def dense_tensors(transform: str, grads: Gradients, whole_rows: bool = False) -> list[Tensor]:
    """Return the gradients' memory for a transform that does not map zero to zero.

    Args:
        transform: The transform's name.
        grads: The gradients.
        whole_rows: Whether it computes along rows.

    Raises:
        GradientError: If a gradient is sparse, complex or sharded within rows that it needs; it names the parameter.
    """
    found = grads.as_list()
    for name, tensor in () if found.is_uniform else grads.items():
        if tensor.layout is not torch.strided or tensor.is_complex():
            raise GradientError(f"{transform}: the gradient of {name!r} is {kind_of(tensor)}; {_LEAVE_OUT}")
        if whole_rows and is_sharded(tensor) and any(place.is_shard() and place.dim for place in tensor.placements):  # type: ignore[attr-defined]
            raise GradientError(f"{transform}: {name!r} is sharded within its rows; {_LEAVE_OUT}")
    return found.local
