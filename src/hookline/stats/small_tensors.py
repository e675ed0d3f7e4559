"""Small tensors on the CPU, whatever their shapes, by NumPy.

Of a few thousand elements, calling an operation costs more than what it does. In the midst of training, where the
caches hold other code, a call of torch's takes 3 to 9 µs and one of NumPy's 1 to 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, sqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hookline.stats import torch_path
from hookline.stats.columns import FAINT, FAR, wide_dtype
from hookline.stats.scratch import scratch

SMALL = 32768  # elements; beyond, calls no longer matter, and torch uses its threads
_TINY = 1024  # elements; up to here tensors are measured together: a call for all costs less than one for each
READ_AT_ONCE = 65536  # elements that `read` takes at most: more than stay in the cache
_ONES = np.ones(READ_AT_ONCE, np.float32)
_lowest, _highest = np.minimum.reduce, np.maximum.reduce  # the methods `min` and `max` take twice as long to get there

Numbers = Any  # an array; its shape and dtype, which its own type would name, say nothing here


class Sums(NamedTuple):
    """What is read of a tensor."""

    total: float
    squares: float
    low: float
    high: float
    others: int  # elements that are not zero


def is_small(tensor: Tensor) -> bool:
    """Whether a tensor can be measured here; an empty one cannot."""
    return 0 < tensor.numel() <= SMALL


def rows_of_small(tensors: Sequence[Tensor]) -> list[list[float]]:
    """The statistics of each tensor."""
    flats = [_wide(tensor).numpy(force=True).ravel() for tensor in tensors]  # a microsecond less than with detach()
    with np.errstate(over="ignore", invalid="ignore"):  # where that happens, it is measured again
        tiny = _read_together([flat for flat in flats if len(flat) <= _TINY])
        return [_row(flat, next(tiny) if len(flat) <= _TINY else read(flat)) for flat in flats]


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float32 else tensor.to(wide_dtype(tensor.dtype))


def read(flat: Numbers) -> Sums:
    """Sum, sum of squares, minimum, maximum and what is not zero. Nobody may mind if NumPy finds something invalid."""
    size, low, high = len(flat), float(_lowest(flat)), float(_highest(flat))
    others = int(np.count_nonzero(np.not_equal(flat, 0, out=scratch.mask[:size]))) if low <= 0 <= high else size
    # A product with ones is a sum, at four times the speed of NumPy's own.
    return Sums(float(flat.dot(_ONES[:size])), float(flat.dot(flat)), low, high, others)


def _read_together(flats: Sequence[Numbers]) -> Iterator[Sums]:
    """The same for several, one behind the other in one array."""
    if not flats:
        return iter(())
    numbers, sizes = np.concatenate(flats, dtype=np.float64), [len(flat) for flat in flats]
    starts = np.cumsum([0, *sizes[:-1]])
    columns = (
        np.add.reduceat(numbers, starts),
        np.add.reduceat(numbers * numbers, starts),
        np.minimum.reduceat(numbers, starts),
        np.maximum.reduceat(numbers, starts),
        np.add.reduceat(numbers != 0, starts, dtype=np.int64),
    )
    return map(Sums, *(column.tolist() for column in columns))


def _row(flat: Numbers, read: Sums) -> list[float]:
    size, (total, squares, low, high, others) = len(flat), read
    mean = total / size
    deviations = squares - mean * total
    near = mean * total <= FAR * deviations  # false for a NaN too
    if not (near and squares < inf and (squares > FAINT or low == high)):
        return _row_with_care(flat)
    std = sqrt(deviations / max(size - 1, 1))
    return [size, mean, std, low, high, max(-low, high), sqrt(squares), size - others, 0, 0]


def _row_with_care(flat: Numbers) -> list[float]:
    """Of one that is far from zero, faint or not finite."""
    wide = torch.from_numpy(flat.astype(np.float64))
    row: list[float] = torch_path.statistics_of_rows(wide.unsqueeze(0))[0].tolist()
    return row
