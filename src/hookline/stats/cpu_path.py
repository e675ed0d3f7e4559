"""The CPU path: large tensors are read from memory once, in blocks that stay in the cache while they are measured.

Only operations that run at the speed of the memory are used. Where torch has a thread or two these are NumPy's; else
its own sum, dot product, minimum, maximum and sign: `var_mean`, `isnan` and comparisons each take 7 to 30 times as
long as one sum, `count_nonzero` and `aminmax` two to six times. What the blocks give is put together in Python's own
floats, which are float64 and cost less than one-element tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import inf, isfinite, nan, sqrt
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hookline.stats import torch_path
from hookline.stats.columns import FAINT, FAR, STATISTICS, wide_dtype
from hookline.stats.from_sums import Numbers, rows_from_sums
from hookline.stats.kinds import Kinds, kinds_of
from hookline.stats.scratch import TOGETHER, scratch
from hookline.stats.small_tensors import READ_AT_ONCE, Small, read, rows_of_small
from hookline.stats.stacks import sums_of_rows

BLOCK = 131072  # elements for each torch thread; 512 KB as float32
_FEW_THREADS = 2  # up to here NumPy, which has one, reads faster than torch
_MOST_THREADS = 16  # so that the scratch memory stays small
_STACKED = 8192  # elements; up to here tensors alike are measured together: a call costs as much as what it does
_MANY = 16  # tensors alike, from which on stacking them costs less than a look at each


class _Sums(NamedTuple):
    """What is read of a block."""

    total: float
    squares: float
    low: float
    high: float
    others: float  # elements that are not zero


class _Part(NamedTuple):
    """What one block gives."""

    size: int
    total: float
    squares: float
    deviations: float
    low: float
    high: float
    zeros: float
    nans: float = 0
    infs: float = 0


class Plan(NamedTuple):
    """How each tensor is measured."""

    stacked: list[list[int]]  # places of small ones alike
    small: Small
    large: list[int]  # and of empty ones


@lru_cache(maxsize=64)
def plan_of(kinds: Kinds) -> Plan:
    """The same for tensors like these, at every step."""
    stacked = [places for places in kinds.places_alike if _stack_well(places, kinds)]
    single = sorted(set(range(len(kinds.shapes))).difference(*stacked))
    small = Small.among(single, kinds)
    return Plan(stacked, small, sorted(set(single).difference(small.places)))


def _stack_well(places: list[int], kinds: Kinds) -> bool:
    """Whether these, of one shape and dtype, are measured together."""
    return len(places) >= _MANY and 0 < kinds.shapes[places[0]].numel() <= _STACKED


def summarize(tensors: Sequence[Tensor], kinds: Kinds | None = None) -> Tensor:
    """One row of statistics per tensor, for tensors that are all on the CPU."""
    stacked, small, large = plan_of(kinds_of(tensors) if kinds is None else kinds)
    if len(small.places) == len(tensors):
        return torch.from_numpy(rows_of_small(tensors, small))
    if stacked and len(stacked[0]) == len(tensors):
        return torch.from_numpy(_stacked_rows(tensors))
    rows = np.empty((len(tensors), len(STATISTICS)))
    if small.places:
        rows[small.places] = rows_of_small(tensors, small)
    for places in stacked:
        rows[places] = _stacked_rows([tensors[place] for place in places])
    for place in large:
        rows[place] = _row(tensors[place])
    return torch.from_numpy(rows)


def _stacked_rows(alike: Sequence[Tensor]) -> Numbers:
    """The rows of small ones, measured together; those that need care once more."""
    sums, size = sums_of_rows(alike), alike[0].numel()
    with np.errstate(over="ignore", invalid="ignore"):  # where that happens, it is measured again
        rows, unsound = rows_from_sums(sums, np.float64(size))
    many = max(TOGETHER // size, 1)
    for start in range(0, len(unsound), many):
        some = unsound[start : start + many]
        wide = torch_path.stacked([alike[place] for place in some])
        rows[some] = torch_path.statistics_of_rows(wide.double()).numpy()
    return rows


def _row(tensor: Tensor) -> list[float]:
    """The row of one tensor."""
    flat, threads = tensor.detach().reshape(-1), torch.get_num_threads()
    if not len(flat):
        return [0, nan, nan, nan, nan, nan, 0, 0, 0, 0]
    if threads > _FEW_THREADS:
        return _together([_measure(*block) for block in _in_blocks(flat, BLOCK * min(threads, _MOST_THREADS))])
    with np.errstate(over="ignore", invalid="ignore"):  # where that happens, it is measured again
        return _together([_part(_Sums(*map(float, read(block))), block) for block in _in_arrays(flat)])


def _in_blocks(flat: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensor's blocks in the precision to compute in, each with scratch memory of its length."""
    wide = wide_dtype(flat.dtype)
    signs, values = scratch.blocks(wide, size)
    for part in torch.split(flat, size):
        many = len(part)
        yield (part if part.dtype is wide else values[:many].copy_(part)), signs[:many]


def _in_arrays(flat: Tensor) -> Iterator[Numbers]:
    """The same as arrays, which cost less to cut than tensors. One in another precision holds until the next comes."""
    wide = wide_dtype(flat.dtype)
    if flat.dtype is wide:
        array = flat.numpy()
        yield from (array[start : start + READ_AT_ONCE] for start in range(0, len(array), READ_AT_ONCE))
        return
    values = scratch.blocks(wide, READ_AT_ONCE)[1]
    array = values.numpy()
    for part in torch.split(flat, READ_AT_ONCE):
        values[: len(part)].copy_(part)
        yield array[: len(part)]


def _measure(block: Tensor, scratch: Tensor) -> _Part:
    """By operations of torch that run at the speed of the memory, in all its threads."""
    signs = torch.sign(block, out=scratch)
    others = round(torch.dot(signs, signs).item()) if isfinite(squares := torch.dot(block, block).item()) else 0
    return _part(_Sums(block.sum().item(), squares, block.amin().item(), block.amax().item(), others), block.numpy())


def _part(sums: _Sums, block: Numbers) -> _Part:
    """What was read of a block, with the deviations; where that is not enough, it is measured again."""
    size, (total, squares, low, high, others) = len(block), sums
    if not FAINT < squares < inf:
        return _measure_with_care(torch.from_numpy(block))
    deviations = squares - total * total / size
    if total * total > FAR * size * deviations:
        deviations = _about(torch.from_numpy(block), total / size)
    return _Part(size, total, squares, deviations, low, high, size - others)


def _about(block: Tensor, mean: float) -> float:
    """The sum of squared deviations; the second term takes back what rounding the mean to the block's dtype added."""
    deviations = block - mean
    left_over = deviations.sum().item()
    return torch.dot(deviations, deviations).item() - left_over * left_over / len(block)


def _measure_with_care(block: Tensor) -> _Part:
    """The same for a block that is all zeros, whose squares over- or underflow, or that is not all finite."""
    size = len(block)
    if block.amin().item() == block.amax().item() == 0:
        return _Part(size, 0.0, 0.0, 0.0, 0.0, 0.0, size)
    row = torch_path.statistics_of_rows(block.double().unsqueeze(0))[0].tolist()
    count, mean, std, low, high, _, l2, zeros, nans, infs = row
    return _Part(size, mean * count, l2 * l2, std * std * (count - 1), low, high, zeros, nans, infs)


def _together(parts: list[_Part]) -> list[float]:
    """The row of a tensor from its blocks: the deviations within them, and those of their means from the mean."""
    columns = list(zip(*parts, strict=True))
    count, total, squares, deviations = (sum(column) for column in columns[:4])
    zeros, nans, infs = (sum(column) for column in columns[6:])
    mean = total / count
    apart = [part.total / part.size - mean for part in parts]
    between = sum(distance * distance * part.size for distance, part in zip(apart, parts, strict=True))
    std = sqrt(max(deviations + between, 0.0) / max(count - 1, 1)) if isfinite(mean) else nan
    low, high = (nan, nan) if nans else (min(columns[4]), max(columns[5]))
    return [count, mean, std, low, high, max(-low, high), sqrt(squares), zeros, nans, infs]
