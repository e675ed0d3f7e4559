"""Compute statistics and norms of tensors on the CPU, reading large ones from memory once and small ones together.

Small tensors are copied next to each other into memory that stays in the cache, because for a few thousand elements
calling an operation costs more than its work: in the middle of training a call of torch takes 3 to 9 µs and one of
NumPy 1 to 3. Large tensors are read in blocks that stay in the cache while they are measured, with operations that run
at the speed of the memory: `var_mean`, `isnan` and comparisons each take 7 to 30 times as long as one sum,
`count_nonzero` and `aminmax` two to six times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from math import inf, isfinite, nan, sqrt
from threading import local
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hookline.stats import torch_ops
from hookline.stats.columns import ABSMAX, COUNT, FAINT, FAR, L2, MAX, MEAN, MIN, STATISTICS, STD, ZEROS, wide_dtype
from hookline.stats.tensor_meta import TensorMeta, group_alike

BLOCK = 131072  # elements of a large tensor for each torch thread; 512 KB as float32
FEW_THREADS = 2  # Up to here NumPy, which uses one thread, reads faster than torch.
MOST_THREADS = 16  # This keeps the scratch memory small.
READ_AT_ONCE = 65536  # elements of a large tensor that NumPy reads at once; more would leave the cache
SCRATCH = 131072  # elements of small tensors that are read together; twice as many leave the cache
STACKED = 8192  # elements; larger tensors of one shape are not stacked
MANY = 16  # tensors of one shape from which on they are stacked: NumPy's products then take a tenth of the time
FEW = 4  # tensors of one dtype; fewer are read in place
CONCATENATED = 16384  # elements; for larger tensors a copy costs more than the calls that it saves
SMALL = 32768  # elements; for larger tensors calls no longer matter
_NORM_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_NUMPY_DTYPES = {torch.float32: np.float32, torch.float64: np.float64}

Array = Any  # A NumPy array; its static type would name a shape and dtype that say nothing here.


class _Scratch(local):
    """Memory that each thread reuses, because writing to new pages costs as much as the work on them.

    Its contents are valid until the thread uses it again. It belongs to NumPy, so that it is neither an inference
    tensor nor a fake one, whatever mode torch was in at the first use.
    """

    def __init__(self) -> None:
        self.mask = np.empty(SCRATCH, np.bool_)
        self._buffers: dict[torch.dtype, Array] = {}

    def buffers(self, dtype: torch.dtype, size: int = SCRATCH) -> Array:
        """Return two rows of at least `size` elements."""
        buffers = self._buffers.get(dtype)
        if buffers is None or buffers.shape[1] < size:
            buffers = self._buffers[dtype] = np.empty((2, size), _NUMPY_DTYPES[dtype])
        return buffers


_scratch = _Scratch()


class Chunk(NamedTuple):
    """Small tensors of one dtype and any shapes that fit into the scratch memory together."""

    indices: list[int]
    sizes: Array
    starts: Array
    slices: list[slice]
    total: int


class Plan(NamedTuple):
    """How each tensor of a list is measured, by index."""

    stacked: list[list[int]]  # small tensors, those of one shape and dtype in each list
    chunks: list[Chunk]  # other small tensors
    in_place: list[int]  # small tensors that are too few or too large for a chunk
    sizes: Array  # of the tensors read in place
    large: list[int]  # and empty ones
    norm_dtype: torch.dtype  # enough for the norms of all tensors in chunks and in place, if they are contiguous
    convert_for_norm: bool  # whether torch has no norms for the dtype of one of these


@lru_cache(maxsize=64)
def plan_for(meta: TensorMeta) -> Plan:
    """Return the plan for tensors of some shapes and dtypes; training repeats them at every step."""
    sizes = [shape.numel() for shape in meta.shapes]
    groups = group_alike(meta.shapes, meta.dtypes)
    stacked = [group for group in groups if len(group) >= MANY and 0 < sizes[group[0]] <= STACKED]
    rest = sorted(set(range(len(sizes))).difference(*stacked))
    small = [index for index in rest if 0 < sizes[index] <= SMALL]
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index in small:
        if sizes[index] <= CONCATENATED:
            by_dtype.setdefault(meta.dtypes[index], []).append(index)
    chunks = [chunk for some in by_dtype.values() if len(some) >= FEW for chunk in _chunks(some, sizes)]
    in_place = sorted(set(small).difference(*(chunk.indices for chunk in chunks)))
    dtypes = {meta.dtypes[index] for index in small}
    return Plan(
        stacked,
        chunks,
        in_place,
        np.array([sizes[index] for index in in_place], np.float64),
        sorted(set(rest).difference(small)),
        torch.float64 if torch.float64 in map(wide_dtype, dtypes) else torch.float32,
        not dtypes <= _NORM_DTYPES,
    )


def _chunks(indices: list[int], sizes: list[int]) -> Iterator[Chunk]:
    """Cut a list of small tensors where the scratch memory is full."""
    begin = total = 0
    for end, index in enumerate([*indices, None]):
        if index is None or total + sizes[index] > SCRATCH:
            own = np.array([sizes[place] for place in indices[begin:end]])
            ends = np.cumsum(own)
            slices = [slice(*both) for both in zip((ends - own).tolist(), ends.tolist(), strict=True)]
            yield Chunk(indices[begin:end], own.astype(np.float64), ends - own, slices, total)
            begin, total = end, 0
        total += 0 if index is None else sizes[index]


# ---- all statistics --------------------------------------------------------------------------------------------------


def summarize(tensors: Sequence[Tensor], meta: TensorMeta) -> Tensor:
    """Return one statistics row per tensor."""
    plan = plan_for(meta)
    rows = np.empty((len(tensors), len(STATISTICS)))
    with np.errstate(over="ignore", invalid="ignore"):  # Tensors in which that happens are measured again.
        for chunk in plan.chunks:
            some = [tensors[index] for index in chunk.indices]
            rows[chunk.indices] = _rows_from_sums(_sums_of_chunk(some, chunk), chunk.sizes, some)
        for group in plan.stacked:
            some = [tensors[index] for index in group]
            rows[group] = _rows_from_sums(_sums_of_stacks(some), np.float64(some[0].numel()), some)
        if plan.in_place:
            some = [tensors[index] for index in plan.in_place]
            wide = [one if one.dtype is torch.float32 else one.to(wide_dtype(one.dtype)) for one in some]
            # numpy(force=True) takes a microsecond less than detach() does.
            sums = np.array([_sums_of_array(one.numpy(force=True).ravel()) for one in wide]).T
            rows[plan.in_place] = _rows_from_sums(sums, plan.sizes, some)
        for index in plan.large:
            rows[index] = _row_of_large(tensors[index])
    return torch.from_numpy(rows)


def _rows_from_sums(sums: Array, sizes: Array, tensors: list[Tensor]) -> Array:
    """Return the rows of tensors from their total, sum of squares, minimum, maximum and number of nonzero elements.

    Tensors for which these are not enough are measured again: those far from zero, faint or not finite.
    """
    totals, squares, low, high, nonzero = sums
    columns = np.zeros((len(STATISTICS), len(tensors)))
    columns[COUNT], columns[MIN], columns[MAX] = sizes, low, high
    mean_part = np.divide(totals, sizes, out=columns[MEAN]) * totals
    deviations = squares - mean_part
    np.sqrt(deviations / np.maximum(sizes - 1, 1), out=columns[STD])
    np.maximum(-low, high, out=columns[ABSMAX])
    np.sqrt(squares, out=columns[L2])
    np.subtract(sizes, nonzero, out=columns[ZEROS])
    rows = columns.T
    # Usually all are fine, which three numbers tell; a NaN makes each comparison false.
    nearness = FAR * deviations - mean_part
    if not (nearness.min() >= 0 and squares.min() > FAINT and squares.max() < inf):
        sound = (nearness >= 0) & (squares < inf) & ((squares > FAINT) | (low == high))
        again = np.flatnonzero(~sound).tolist()
        # Some tensors at a time, so that they stay in the cache.
        many = max(SCRATCH // max((tensors[index].numel() for index in again), default=1), 1)
        for start in range(0, len(again), many):
            some = again[start : start + many]
            rows[some] = torch_ops.summarize([tensors[index] for index in some], torch.float64).numpy()
    return rows


def _sums_of_chunk(tensors: list[Tensor], chunk: Chunk) -> Array:
    """Return sum, sum of squares, minimum, maximum and number of nonzero elements, one column per tensor."""
    starts = chunk.starts
    values = _scratch.buffers(wide_dtype(tensors[0].dtype))[0, : chunk.total]
    # Converting all at once would be faster alone, but would wait for torch's threads where the cores are busy.
    torch.cat([tensor.flatten() for tensor in tensors], out=torch.from_numpy(values))
    nonzero = np.not_equal(values, 0, out=_scratch.mask[: chunk.total])
    parts = [values[own] for own in chunk.slices]
    found = np.empty((5, len(tensors)))
    found[0] = np.add.reduceat(values, starts)
    found[1] = [part.dot(part) for part in parts]
    found[2] = np.minimum.reduceat(values, starts)
    found[3] = np.maximum.reduceat(values, starts)
    # Most tensors have no zeros, and asking that of all takes a quarter of the time of counting.
    found[4] = chunk.sizes if nonzero.all() else np.add.reduceat(nonzero.view(np.uint8), starts, dtype=np.uint32)
    return found


def _sums_of_stacks(alike: list[Tensor]) -> Array:
    """Return the same for tensors of one shape and dtype."""
    found, size = np.empty((5, len(alike))), alike[0].numel()
    ones = np.ones(size, _NUMPY_DTYPES[wide_dtype(alike[0].dtype)])
    for some, rows in _stacks(alike):
        nonzero = np.not_equal(rows, 0, out=_scratch.mask[: rows.size].reshape(rows.shape))
        found[0, some] = np.matmul(rows, ones)  # a sum, at twice the speed of one
        found[1, some] = _squares_of_rows(rows)
        found[2, some] = np.minimum.reduce(rows, axis=1)
        found[3, some] = np.maximum.reduce(rows, axis=1)
        found[4, some] = size if nonzero.all() else np.add.reduce(nonzero.view(np.uint8), axis=1, dtype=np.uint32)
    return found


def _stacks(alike: list[Tensor]) -> Iterator[tuple[slice, Array]]:
    """Yield tensors of one shape and dtype as matrices, one row each, in the precision to compute in.

    A matrix is valid until the next one is made.
    """
    size, wide = alike[0].numel(), wide_dtype(alike[0].dtype)
    many = min(max(SCRATCH // size, 1), len(alike))
    rows = _scratch.buffers(wide, many * size)[0, : many * size].reshape(many, size)
    memory = torch.from_numpy(rows).view(many, *alike[0].shape)
    for start in range(0, len(alike), many):
        some = tuple(alike[start : start + many])
        target = memory[: len(some)]
        if some[0].dtype is wide:
            torch.stack(some, out=target)
        else:
            target.copy_(torch.stack(some))
        yield slice(start, start + len(some)), rows[: len(some)]


def _squares_of_rows(rows: Array) -> Array:
    """Return the sum of squares of each row, as a product of a matrix of one row with one of one column."""
    return np.matmul(rows[:, None, :], rows[:, :, None]).reshape(-1)


# ---- large tensors ---------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """What one block contributes to the row of a large tensor."""

    size: int
    total: float
    squares: float
    deviations: float
    low: float
    high: float
    zeros: float
    nans: float = 0
    infs: float = 0


def _row_of_large(tensor: Tensor) -> list[float]:
    """Return the row of one tensor, put together in Python's floats: they cost less than tensors of one element."""
    flat, threads = tensor.detach().flatten(), torch.get_num_threads()
    if not len(flat):
        return [0, nan, nan, nan, nan, nan, 0, 0, 0, 0]
    if threads <= FEW_THREADS:
        return _merge_parts([_part(block, *map(float, _sums_of_array(block))) for block in _arrays(flat)])
    # torch reads each block in all its threads, with operations that run at the speed of the memory.
    parts, size, wide = [], BLOCK * min(threads, MOST_THREADS), wide_dtype(flat.dtype)
    signs, values = map(torch.from_numpy, _scratch.buffers(wide, size))
    for part in torch.split(flat, size):
        block = part if part.dtype is wide else values[: len(part)].copy_(part)
        squares, sign = torch.dot(block, block).item(), torch.sign(block, out=signs[: len(part)])
        nonzero = round(torch.dot(sign, sign).item()) if isfinite(squares) else 0
        extremes = block.amin().item(), block.amax().item()
        parts.append(_part(block.numpy(force=True), block.sum().item(), squares, *extremes, nonzero))
    return _merge_parts(parts)


def _arrays(flat: Tensor) -> Iterator[Array]:
    """Yield the blocks of a tensor as arrays, which cost less to cut; a converted one is valid until the next."""
    wide = wide_dtype(flat.dtype)
    if flat.dtype is wide:
        array = flat.numpy(force=True)
        yield from (array[start : start + READ_AT_ONCE] for start in range(0, len(array), READ_AT_ONCE))
        return
    array = _scratch.buffers(wide)[1]
    values = torch.from_numpy(array)
    for part in torch.split(flat, READ_AT_ONCE):
        values[: len(part)].copy_(part)
        yield array[: len(part)]


def _sums_of_array(array: Array) -> tuple[Any, ...]:
    """Return sum, sum of squares, minimum, maximum and number of nonzero elements of an array."""
    size = len(array)
    nonzero = np.count_nonzero(np.not_equal(array, 0, out=_scratch.mask[:size]))
    # A product with ones is a sum at four times the speed of NumPy's, and argmin takes half the time of min.
    total, squares = array.dot(_ones(array.dtype)[:size]), array.dot(array)
    return total, squares, array[array.argmin()], array[array.argmax()], nonzero


@lru_cache
def _ones(dtype: Any) -> Array:
    return np.ones(READ_AT_ONCE, dtype)


def _part(block: Array, total: float, squares: float, low: float, high: float, nonzero: float) -> _Part:
    """Add the squared deviations to what was read of a block, and read it again where that was not enough."""
    size = len(block)
    if not FAINT < squares < inf:
        # The block is all zeros, its squares over- or underflow, or it is not finite.
        if low == high == 0:
            return _Part(size, 0.0, 0.0, 0.0, 0.0, 0.0, size)
        row = torch_ops.statistics_of_rows(torch.from_numpy(block).double().unsqueeze(0))[0].tolist()
        count, mean, std, low, high, _, l2, zeros, nans, infs = row
        return _Part(size, mean * count, l2 * l2, std * std * (count - 1), low, high, zeros, nans, infs)
    deviations = squares - total * total / size
    if total * total > FAR * size * deviations:
        apart = torch.from_numpy(block) - total / size
        rest = apart.sum().item()  # what rounding the mean to the block's dtype left
        deviations = torch.dot(apart, apart).item() - rest * rest / size
    return _Part(size, total, squares, deviations, low, high, size - nonzero)


def _merge_parts(parts: list[_Part]) -> list[float]:
    """Return the row of a tensor: the deviations within its blocks, and those of their means from its mean."""
    columns = list(zip(*parts, strict=True))
    count, total, squares, deviations = (sum(column) for column in columns[:4])
    zeros, nans, infs = (sum(column) for column in columns[6:])
    mean = total / count
    apart = [part.total / part.size - mean for part in parts]
    # A product of floats may become infinite; a power would raise instead.
    between = sum(distance * distance * part.size for distance, part in zip(apart, parts, strict=True))
    std = sqrt(max(deviations + between, 0.0) / max(count - 1, 1)) if isfinite(mean) else nan
    low, high = (nan, nan) if nans else (min(columns[4]), max(columns[5]))
    return [count, mean, std, low, high, max(-low, high), sqrt(squares), zeros, nans, infs]


# ---- norms alone -----------------------------------------------------------------------------------------------------


def norms(tensors: Sequence[Tensor], meta: TensorMeta) -> Tensor:
    """Return the L2 norm of each tensor, in less than half the time of all statistics."""
    plan, found = plan_for(meta), np.empty(len(tensors))
    small = [*chain.from_iterable(chunk.indices for chunk in plan.chunks), *plan.in_place]
    if small:
        # torch reads each tensor in place: in training that takes half the time of copies and NumPy's products.
        some = [tensors[index] for index in small]
        some = [tensor.to(wide_dtype(tensor.dtype)) for tensor in some] if plan.convert_for_norm else some
        # torch adds up memory with gaps element by element, which costs digits in float32.
        dtype = plan.norm_dtype if all(map(Tensor.is_contiguous, some)) else torch.float64
        found[small] = [norm.item() for norm in torch._foreach_norm(some, 2, dtype)]
    with np.errstate(over="ignore", invalid="ignore"):
        for group in plan.stacked:
            squares = [_squares_of_rows(rows) for _, rows in _stacks([tensors[index] for index in group])]
            found[group] = np.sqrt(np.concatenate(squares))
    for index in plan.large:
        # Large tensors are taken in blocks: over millions of elements float32 loses digits.
        blocks = (block.to(wide_dtype(block.dtype)) for block in torch.split(tensors[index].flatten(), BLOCK))
        found[index] = sqrt(sum(torch.dot(block, block).item() for block in blocks))
    for index in np.flatnonzero(~((found > sqrt(FAINT)) & (found < inf))).tolist():  # over- or underflown in float32
        found[index] = tensors[index].double().square().sum().sqrt().item()
    return torch.from_numpy(found)
