"""The memory behind gradients: plain tensors that can be read and written in place, whatever holds them.

Of a DTensor that is the shard on this rank, of a sparse gradient its values, of a complex one pairs of real numbers.
What is computed element by element from them, with zero for zero, is right for the whole gradient; sums over them must
be taken over the shards, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from hookline.errors import GradientError
from hookline.stats.columns import wide_dtype
from hookline.stats.kinds import PLAIN


def are_same(some: list[Tensor], others: list[Tensor]) -> bool:
    """Whether both lists hold the very same tensors, in the same order."""
    return some is others or (len(some) == len(others) and all(map(is_, some, others)))


def numbers_of(tensors: list[Tensor]) -> list[Tensor]:
    """The memory of each gradient; of a sparse one that is not coalesced, a copy of what coalescing gives."""
    return tensors if are_plain(tensors) else [memory_of(tensor) for tensor in tensors]


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether none of them is sharded, sparse or complex; few kinds occur, so that sets of them are looked at."""
    kinds, layouts = {type(tensor) for tensor in tensors}, {tensor.layout for tensor in tensors}
    return kinds <= PLAIN and layouts <= {torch.strided} and not any(map(torch.is_complex, tensors))


def memory_of(tensor: Tensor) -> Tensor:
    """The memory of one gradient."""
    memory = _here(tensor)
    return torch.view_as_real(memory) if memory.is_complex() else memory


def _here(tensor: Tensor) -> Tensor:
    if is_sharded(tensor):
        _refuse_partial(tensor)
        with torch.no_grad():  # else it would be a new view each time
            local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return local
    return tensor.coalesce()._values() if tensor.layout is torch.sparse_coo else tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor; asked so, because importing that class takes longer than importing all of Hookline."""
    return hasattr(type(tensor), "to_local")


def any_sharded(tensors: Sequence[Tensor]) -> bool:
    """Whether there is a DTensor among them."""
    return any(hasattr(kind, "to_local") for kind in {type(tensor) for tensor in tensors})


def are_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether all are of one dtype and on one device."""
    return len({tensor.dtype for tensor in tensors}) <= 1 and len({tensor.device for tensor in tensors}) <= 1


def by_kind(tensors: list[Tensor]) -> list[list[Tensor]]:
    """The tensors of each device and dtype by themselves: foreach operations are fused for one kind only."""
    if are_alike(tensors):
        return [tensors] if tensors else []
    return [[tensors[place] for place in places] for places in places_by_kind(tensors)]


def places_by_kind(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Where the tensors of each device and dtype stand."""
    kinds: dict[Any, list[int]] = {}
    for place, tensor in enumerate(tensors):
        kinds.setdefault((tensor.device, tensor.dtype), []).append(place)
    return list(kinds.values())


def multiply_(tensors: list[Tensor], factor: Tensor | float) -> None:
    """Multiply all of them in place by one number, which may still be on a device."""
    multiply_groups_(by_kind(tensors), factor)


def multiply_groups_(groups: list[list[Tensor]], factor: Tensor | float) -> None:
    """The same for tensors that are grouped by kind already."""
    for alike in groups:
        torch._foreach_mul_(alike, _exact(factor, alike[0]))


def _exact(factor: Tensor | float, like: Tensor) -> Tensor | float:
    """A factor that a foreach operation applies unrounded: on the CPU it rounds a plain number to bf16 or fp16."""
    if isinstance(factor, Tensor):
        return factor.to(like.device)
    return torch.tensor(factor, dtype=wide_dtype(like.dtype)) if like.device.type == "cpu" else factor


def _refuse_partial(tensor: Any) -> None:
    if any(place.is_partial() for place in tensor.placements):
        shape, places = tuple(tensor.shape), tensor.placements
        raise GradientError(f"a gradient of shape {shape} is not added up over its mesh yet ({places}); redistribute")
