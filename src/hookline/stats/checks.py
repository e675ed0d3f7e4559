"""Refusing what cannot be summarised together, by name and with the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product, starmap
from operator import attrgetter

import torch
from torch import Tensor

from hookline.errors import HooklineError

_DTYPE, _LAYOUT, _DEVICE = map(attrgetter, ("dtype", "layout", "device"))


def check(tensors: Sequence[Tensor], names: Sequence[object] | None = None) -> None:
    """Raise for a tensor that has no statistics here, and for tensors on several devices.

    The kinds that occur are few, so a set of them is checked and the culprit looked for only when there is one.
    """
    kinds, dtypes, layouts = (set(map(fact, tensors)) for fact in (type, _DTYPE, _LAYOUT))
    if len(set(map(_DEVICE, tensors))) > 1 or any(starmap(_problem, product(kinds, dtypes, layouts))):
        _refuse(tensors, names or [f"tensor {index}" for index in range(len(tensors))])


def _problem(kind: type[Tensor], dtype: torch.dtype, layout: torch.layout) -> str | None:
    if layout is not torch.strided:
        return f"has the layout {layout}; pass its values() or to_dense()"
    if dtype.is_complex:
        return f"is {dtype}; pass torch.view_as_real(tensor) or tensor.abs()"
    if hasattr(kind, "to_local"):
        return "is a DTensor; hookline.stats.pieces.Pieces measures it over all ranks"
    return None


def _refuse(tensors: Sequence[Tensor], names: Sequence[object]) -> None:
    for name, tensor in zip(names, tensors, strict=True):
        if problem := _problem(type(tensor), tensor.dtype, tensor.layout):
            raise HooklineError(f"no statistics of {name}: it {problem}")
        if tensor.device != tensors[0].device:
            where = f"{name} is on {tensor.device}, but {names[0]} is on {tensors[0].device}"
            raise HooklineError(f"{where}: summarise each device's tensors by themselves")
