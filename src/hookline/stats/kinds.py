"""What is true of tensors apart from their values: found out once, and known again at later steps in one call."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

PLAIN = {torch.Tensor, torch.nn.Parameter}
"""The types of tensors that are their own memory, unless they are sparse or complex."""

Guards: Any
try:  # what compiled code asks whether tensors are like those it was compiled for
    from torch._C._dynamo.guards import TensorGuards as Guards
except ImportError:  # then everything is found out at every step, which takes five times as long
    Guards = None

_DTYPE, _SHAPE, _DEVICE, _LAYOUT, _IN_GRAPH = map(attrgetter, ("dtype", "shape", "device", "layout", "requires_grad"))


@dataclass(frozen=True, eq=False)
class Kinds:
    """What some tensors have in common, and what each of them is like. Of equal kinds there is one object."""

    plain: bool
    """Whether none of them is sharded, sparse or complex."""
    alike: bool
    """Whether all are of one dtype and on one device."""
    contiguous: bool
    """Whether the elements of each lie one after the other, in their order."""
    in_graph: bool
    """Whether autograd would follow what is computed from them."""
    on_cpu: bool
    """Whether all are in the host's memory."""
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[torch.Size, ...]

    @cached_property
    def places_alike(self) -> list[list[int]]:
        """Where those of each shape and dtype stand."""
        places: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
        for place, kind in enumerate(zip(self.shapes, self.dtypes, strict=True)):
            places.setdefault(kind, []).append(place)
        return list(places.values())


_recent: deque[tuple[int, Any, Kinds]] = deque(maxlen=8)


def kinds_of(tensors: Sequence[Tensor]) -> Kinds:
    """The kinds of these; of tensors like those of an earlier step, in every respect, the very object of then."""
    for count, guards, known in tuple(_recent):  # another thread may be adding to it
        if count == len(tensors) and guards.check(*tensors):
            return known
    kinds = _find_out(tensors)
    if kinds.plain and tensors and (guards := _guards_of(tensors)) is not None:
        _recent.appendleft((len(tensors), guards, kinds))
    return kinds


def _guards_of(tensors: Sequence[Tensor]) -> Any:
    """What knows tensors like these again; None where this torch has no such thing, or another."""
    sizes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
    try:
        return Guards and Guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    except (TypeError, SystemError):
        return None


def _find_out(tensors: Sequence[Tensor]) -> Kinds:
    """The kinds that occur are few, so that sets of them are looked at."""
    dtypes, strided = tuple(map(_DTYPE, tensors)), set(map(_LAYOUT, tensors)) <= {torch.strided}
    real = not any(dtype.is_complex for dtype in set(dtypes))
    plain = strided and real and PLAIN.issuperset(map(type, tensors))
    devices = set(map(_DEVICE, tensors))
    alike, on_cpu = len(set(dtypes)) <= 1 and len(devices) <= 1, all(device.type == "cpu" for device in devices)
    contiguous = strided and all(map(Tensor.is_contiguous, tensors))
    in_graph = any(map(_IN_GRAPH, tensors))
    return _the_one(plain, alike, contiguous, in_graph, on_cpu, dtypes, tuple(map(_SHAPE, tensors)))


_the_one = lru_cache(maxsize=64)(Kinds)
