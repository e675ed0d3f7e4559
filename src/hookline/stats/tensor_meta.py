"""Read what a list of tensors is like apart from its values: types, dtypes, layouts and devices."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from hookline._tensors import PLAIN_TYPES

_DTYPE, _DEVICE, _LAYOUT, _IS_COMPLEX = map(attrgetter, ("dtype", "device", "layout", "is_complex"))


class TensorMeta(NamedTuple):
    """Facts about a list of tensors."""

    plain: bool
    """Whether none of them is sharded, sparse, complex or of another subclass."""
    uniform: bool
    """Whether all are plain, and of one dtype and on one device."""
    devices: set[torch.device]


def tensor_meta(tensors: Sequence[Tensor]) -> TensorMeta:
    """Return the facts about some tensors."""
    # Reading one attribute of 500 tensors takes 25 to 45 µs, so only those are read that every caller needs. Few
    # different dtypes, types and devices occur, so sets of them are examined.
    dtypes, devices = set(map(_DTYPE, tensors)), set(map(_DEVICE, tensors))
    strided, real = set(map(_LAYOUT, tensors)) <= {torch.strided}, not any(map(_IS_COMPLEX, dtypes))
    plain = strided and real and PLAIN_TYPES.issuperset(map(type, tensors))
    return TensorMeta(plain, plain and len(dtypes) == len(devices) == 1, devices)


SHAPE_AND_DTYPE: Callable[[Tensor], Hashable] = attrgetter("shape", "dtype")
DEVICE_AND_DTYPE: Callable[[Tensor], Hashable] = attrgetter("device", "dtype")


def indices_by(kind: Callable[[Tensor], Hashable], tensors: Iterable[Tensor]) -> list[list[int]]:
    """Return the indices of the tensors of each kind, in the order in which the kinds first appear."""
    groups: dict[Hashable, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(kind(tensor), []).append(index)
    return list(groups.values())
