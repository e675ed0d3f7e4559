"""Small tensors on the CPU, whatever their shapes, by NumPy.

Of a few thousand elements, calling an operation costs more than what it does. In the midst of training, where the
caches hold other code, a call of torch's takes 3 to 9 µs and one of NumPy's 1 to 3. So the smallest are laid end to end
and read together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._C._nn import flatten_dense_tensors

from hookline.stats import torch_path
from hookline.stats.columns import wide_dtype
from hookline.stats.from_sums import Numbers, rows_from_sums
from hookline.stats.kinds import Kinds
from hookline.stats.scratch import scratch

SMALL = 32768  # elements; beyond, calls no longer matter, and torch uses its threads
TINY = 1024  # elements; up to here a call for all costs less than one for each
READ_AT_ONCE = 65536  # elements that `read` takes at most: more than stay in the cache
_ONES = np.ones(READ_AT_ONCE, np.float32)
_not_zero, _count = np.not_equal, np.count_nonzero


class Small(NamedTuple):
    """Which of some tensors are small, and what is known of them beforehand."""

    places: list[int]
    tiny: list[int]  # those that are read together
    others: list[int]
    alike: bool  # whether the tiny ones are of one dtype
    starts: Numbers  # of each tiny one, end to end
    sizes: Numbers  # of the tiny ones, then of the others
    order: Numbers  # where the first of the places stands among these, the second, and so on

    def of(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The tiny ones, which can be laid end to end, and the others."""
        tiny = [tensors[place] for place in self.tiny]
        return tiny if self.alike else list(map(_wide, tiny)), [tensors[place] for place in self.others]

    @classmethod
    def among(cls, places: Sequence[int], kinds: Kinds) -> Small:
        """The small ones at these places; an empty tensor is not."""
        sizes = {place: kinds.shapes[place].numel() for place in places}
        tiny = [place for place in places if 0 < sizes[place] <= TINY]
        others = [place for place in places if TINY < sizes[place] <= SMALL]
        found = np.array([sizes[place] for place in tiny + others], np.float64)
        starts = np.cumsum([0, *(sizes[place] for place in tiny[:-1])])
        alike = len({kinds.dtypes[place] for place in tiny}) == 1
        return cls(sorted(tiny + others), tiny, others, alike, starts, found, np.argsort(tiny + others))


def rows_of_small(tensors: Sequence[Tensor], small: Small) -> Numbers:
    """The statistics of each small tensor, in their order."""
    tiny, others = small.of(tensors)
    with np.errstate(over="ignore", invalid="ignore"):  # where that happens, it is measured again
        sums = np.empty((5, len(small.sizes)))
        if tiny:
            _read_together(_end_to_end(tiny), small.starts, sums[:, : len(tiny)])
        if others:
            sums[:, len(tiny) :] = np.array([read(_flat(tensor)) for tensor in others]).T
        rows, unsound = rows_from_sums(sums, small.sizes)
    for place in unsound:
        rows[place] = _row_with_care((tiny + others)[place])
    return rows[small.order]


def squares_of_small(tensors: Sequence[Tensor], small: Small) -> Numbers:
    """The sum of squares of each small tensor, in their order."""
    tiny, others = small.of(tensors)
    with np.errstate(over="ignore", invalid="ignore"):  # whoever asks sees it in the numbers
        squares = np.empty(len(small.sizes))
        if tiny:
            flat = _end_to_end(tiny)
            squares[: len(tiny)] = np.add.reduceat(flat * flat, small.starts)
        squares[len(tiny) :] = [flat.dot(flat) for flat in map(_flat, others)]
    return squares[small.order]


def _end_to_end(tiny: list[Tensor]) -> Numbers:
    return _flat(flatten_dense_tensors(tiny))  # of a single one, no copy is made


def _flat(tensor: Tensor) -> Numbers:
    return _wide(tensor).numpy(force=True).ravel()  # a microsecond less than with detach()


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float32 else tensor.to(wide_dtype(tensor.dtype))


def read(flat: Numbers) -> tuple[Any, ...]:
    """Sum, sum of squares, minimum, maximum and what is not zero. Nobody may mind if NumPy finds something invalid."""
    size = len(flat)
    others = _count(_not_zero(flat, 0, out=scratch.mask[:size]))
    # A product with ones is a sum at four times the speed of NumPy's own, and where a minimum lies is found twice as
    # fast as what it is.
    return flat.dot(_ONES[:size]), flat.dot(flat), flat[flat.argmin()], flat[flat.argmax()], others


def _read_together(flat: Numbers, starts: Numbers, sums: Numbers) -> None:
    """The same for several, end to end in one array."""
    sums[0] = np.add.reduceat(flat, starts)
    sums[1] = np.add.reduceat(flat * flat, starts)
    sums[2] = np.minimum.reduceat(flat, starts)
    sums[3] = np.maximum.reduceat(flat, starts)
    sums[4] = np.add.reduceat(_not_zero(flat, 0), starts, dtype=np.int64)


def _row_with_care(tensor: Tensor) -> Numbers:
    """Of one that is far from zero, faint or not finite."""
    wide = tensor.detach().double().reshape(1, -1)
    return torch_path.statistics_of_rows(wide)[0].numpy()
