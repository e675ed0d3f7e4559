"""Get at the memory behind gradients: plain tensors that can be read and written in place.

Of a DTensor that is the shard on this rank, of a sparse gradient its values, of a complex one pairs of real numbers.
A function of single elements that maps zero to zero, applied to them, is right for the whole gradient; sums over them
must also be taken over the shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hookline.errors import GradientError
from hookline.stats.columns import wide_dtype
from hookline.stats.tensor_meta import tensor_meta


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing that class, which takes longer than all of Hookline."""
    return hasattr(type(tensor), "to_local")


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the memory of one gradient; for an uncoalesced sparse one, a copy of what coalescing gives."""
    if is_sharded(tensor):
        placements = tensor.placements  # type: ignore[attr-defined]
        if any(place.is_partial() for place in placements):
            raise GradientError(
                f"a gradient of shape {tuple(tensor.shape)} is not reduced over its mesh yet ({placements}); "
                "redistribute it"
            )
        with torch.no_grad():  # otherwise every call would return a new view
            tensor = tensor.to_local()  # type: ignore[attr-defined]
    elif tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()._values()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def local_tensors(tensors: list[Tensor]) -> list[Tensor]:
    """Return the memory of each gradient; the list itself if all of them are plain."""
    return tensors if tensor_meta(tensors).plain else [local_tensor(tensor) for tensor in tensors]


def indices_by_kind(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the positions of the tensors of each device and dtype."""
    kinds: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault((tensor.device, tensor.dtype), []).append(index)
    return list(kinds.values())


def group_by_kind(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Group tensors by device and dtype, because foreach operations are fused for one kind only."""
    return [[tensors[index] for index in indices] for indices in indices_by_kind(tensors)]


def multiply_(groups: list[list[Tensor]], factor: Tensor | float) -> None:
    """Multiply tensors, grouped by kind, in place by one number, which may be on a device."""
    for tensors in groups:
        like = tensors[0]
        if isinstance(factor, Tensor):
            exact: Tensor | float = factor.to(like.device)
        elif like.is_cpu:
            # On the CPU a foreach operation would round a Python number to bf16 or fp16 first.
            exact = torch.tensor(factor, dtype=wide_dtype(like.dtype))
        else:
            exact = factor
        torch._foreach_mul_(tensors, exact)
