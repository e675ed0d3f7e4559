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
from operator import mul
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
READ_AT_ONCE = 65536  # elements that NumPy reads at once; more would leave the cache
SCRATCH = 131072  # elements of small tensors that are read together; twice as many leave the cache
STACKED = 8192  # elements; larger tensors of one shape are not stacked
MANY = 16  # tensors of one shape from which on they are stacked: NumPy's products then take a tenth of the time
FEW = 4  # tensors of one dtype; fewer are read in place
CONCATENATED = 16384  # elements; for larger tensors a copy costs more than the calls that it saves
SMALL = 32768  # elements; for larger tensors calls no longer matter, and norms in float32 would lose digits
_NORM_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_FAINT_NORM = sqrt(FAINT)
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
    """Small tensors of one dtype that fit into the scratch memory together."""

    indices: list[int]
    sizes: Array
    starts: Array
    slices: list[slice]
    alike: bool  # whether all have one shape


class Plan(NamedTuple):
    """How each tensor of a list is measured, by index."""

    chunks: list[Chunk]
    small: list[int]  # the tensors of the chunks, and then those that are too few or too large for one
    sizes: Array  # of the small tensors
    large: list[int]  # and empty ones
    unlike: list[int]  # small tensors in no chunk of equal shapes
    norm_dtype: torch.dtype  # enough for the norms of these, if they are contiguous
    convert_for_norm: bool  # whether torch has no norms for the dtype of one of these


@lru_cache(maxsize=64)
def plan_for(meta: TensorMeta) -> Plan:
    """Return the plan for tensors of some shapes and dtypes; training repeats them at every step."""
    sizes = [shape.numel() for shape in meta.shapes]
    alike = [group for group in group_alike(meta.shapes, meta.dtypes) if len(group) >= MANY]
    stacked = [group for group in alike if 0 < sizes[group[0]] <= STACKED]
    rest = sorted(set(range(len(sizes))).difference(*stacked))
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index in rest:
        if 0 < sizes[index] <= CONCATENATED:
            by_dtype.setdefault(meta.dtypes[index], []).append(index)
    concatenated = [group for group in by_dtype.values() if len(group) >= FEW]
    in_place = [index for index in sorted(set(rest).difference(*concatenated)) if 0 < sizes[index] <= SMALL]
    unlike = [*chain(*concatenated), *in_place]
    small = [*chain(*stacked), *unlike]
    dtypes = {meta.dtypes[index] for index in unlike}
    return Plan(
        [chunk for group in (*stacked, *concatenated) for chunk in _chunks(group, sizes, group in stacked)],
        small,
        np.array([sizes[index] for index in small], np.float64),
        sorted(set(rest).difference(unlike)),
        unlike,
        torch.float64 if torch.float64 in map(wide_dtype, dtypes) else torch.float32,
        not dtypes <= _NORM_DTYPES,
    )


def _chunks(indices: list[int], sizes: list[int], alike: bool) -> Iterator[Chunk]:
    """Cut a list of small tensors where the scratch memory is full."""
    begin = total = 0
    for end, index in enumerate([*indices, None]):
        if index is None or total + sizes[index] > SCRATCH:
            own = np.array([sizes[place] for place in indices[begin:end]])
            ends = np.cumsum(own)
            slices = [slice(*both) for both in zip((ends - own).tolist(), ends.tolist(), strict=True)]
            yield Chunk(indices[begin:end], own.astype(np.float64), ends - own, slices, alike)
            begin, total = end, 0
        total += 0 if index is None else sizes[index]


# ---- all statistics --------------------------------------------------------------------------------------------------


def summarize(tensors: Sequence[Tensor], meta: TensorMeta) -> Tensor:
    """Return one statistics row per tensor."""
    plan = plan_for(meta)
    rows = np.empty((len(tensors), len(STATISTICS)))
    with np.errstate(over="ignore", invalid="ignore"):  # Tensors in which that happens are measured again.
        if plan.small:
            small = [tensors[index] for index in plan.small]
            sums, done = np.empty((5, len(small))), 0
            for chunk in plan.chunks:
                begin, done = done, done + len(chunk.indices)
                _sums_of_chunk(small[begin:done], chunk, sums[:, begin:done])
            for place, tensor in enumerate(small[done:], done):
                wide = tensor if tensor.dtype is torch.float32 else tensor.to(wide_dtype(tensor.dtype))
                # numpy(force=True) takes a microsecond less than detach() does.
                sums[:, place] = _sums_of_array(wide.numpy(force=True).ravel())
            rows[plan.small] = _rows_from_sums(sums, plan.sizes, small)
        for index in plan.large:
            rows[index] = _row_of_large(tensors[index])
    return torch.from_numpy(rows)


def _rows_from_sums(sums: Array, sizes: Array, tensors: Sequence[Tensor]) -> Array:
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


def _values_of_chunk(tensors: list[Tensor], chunk: Chunk) -> Array:
    """Copy the tensors of a chunk into the scratch memory, one after the other, in the precision to compute in."""
    wide = wide_dtype(tensors[0].dtype)
    values: Array = _scratch.buffers(wide)[0, : chunk.slices[-1].stop]
    memory = torch.from_numpy(values)
    if not chunk.alike:
        # Converting all at once would be faster alone, but would wait for torch's threads where the cores are busy.
        torch.cat([tensor.flatten() for tensor in tensors], out=memory)
    elif tensors[0].dtype is wide:
        torch.stack(tensors, out=memory.view(len(tensors), *tensors[0].shape))
    else:
        memory.view(len(tensors), *tensors[0].shape).copy_(torch.stack(tensors))
    return values


def _sums_of_chunk(tensors: list[Tensor], chunk: Chunk, sums: Array) -> None:
    """Write sum, sum of squares, minimum, maximum and number of nonzero elements, one column per tensor."""
    values = _values_of_chunk(tensors, chunk)
    if chunk.alike:
        rows = values.reshape(len(tensors), -1)
        sums[0] = np.matmul(rows, np.ones(rows.shape[1], rows.dtype))  # a sum, at twice the speed of one
        sums[1] = _squares_of_rows(rows)
    else:
        parts = [values[own] for own in chunk.slices]
        sums[0] = np.add.reduceat(values, chunk.starts)
        sums[1] = [part.dot(part) for part in parts]
    # For rows of a thousand elements these take half the time of a reduction along the rows of a matrix.
    sums[2] = np.minimum.reduceat(values, chunk.starts)
    sums[3] = np.maximum.reduceat(values, chunk.starts)
    nonzero = np.not_equal(values, 0, out=_scratch.mask[: len(values)])
    # Most tensors have no zeros, and asking that of all takes a quarter of the time of counting.
    sums[4] = chunk.sizes if nonzero.all() else np.add.reduceat(nonzero.view(np.uint8), chunk.starts, dtype=np.uint32)


def _squares_of_rows(rows: Array) -> Array:
    """Return the sum of squares of each row, as a product of a matrix of one row with one of one column."""
    return np.matmul(rows[:, None, :], rows[:, :, None]).reshape(-1)


def _sums_of_array(array: Array) -> tuple[Any, ...]:
    """Return the same numbers for one array of at most `READ_AT_ONCE` elements."""
    size = len(array)
    nonzero = np.count_nonzero(np.not_equal(array, 0, out=_scratch.mask[:size]))
    # A product with ones is a sum at four times the speed of NumPy's, and argmin takes half the time of min.
    total, squares = array.dot(_ones(array.dtype)[:size]), array.dot(array)
    return total, squares, array[array.argmin()], array[array.argmax()], nonzero


@lru_cache
def _ones(dtype: Any) -> Array:
    return np.ones(READ_AT_ONCE, dtype)


# ---- large tensors ---------------------------------------------------------------------------------------------------


def _row_of_large(tensor: Tensor) -> list[float]:
    """Return the row of one tensor, put together in Python's floats: they cost less than tensors of one element."""
    flat, threads = tensor.detach().contiguous().view(-1), torch.get_num_threads()
    if not len(flat):
        return [0, nan, nan, nan, nan, nan, 0, 0, 0, 0]
    if threads <= FEW_THREADS:
        return _merge_blocks([_row_of_block(array, *map(float, _sums_of_array(array))) for array in _arrays(flat)])
    # torch reads each block in all its threads, with operations that run at the speed of the memory.
    rows, size, wide = [], BLOCK * min(threads, MOST_THREADS), wide_dtype(flat.dtype)
    signs, values = map(torch.from_numpy, _scratch.buffers(wide, size))
    for part in torch.split(flat, size):
        block = part if part.dtype is wide else values[: len(part)].copy_(part)
        squares, sign = torch.dot(block, block).item(), torch.sign(block, out=signs[: len(part)])
        nonzero = round(torch.dot(sign, sign).item()) if isfinite(squares) else 0
        extremes = block.amin().item(), block.amax().item()
        rows.append(_row_of_block(block.numpy(force=True), block.sum().item(), squares, *extremes, nonzero))
    return _merge_blocks(rows)


def _arrays(flat: Tensor) -> Iterator[Array]:
    """Yield the blocks of a tensor as arrays, in the precision to compute in."""
    wide = wide_dtype(flat.dtype)
    if flat.dtype is wide:
        array = flat.numpy(force=True)  # It costs a tenth of the time to cut, 6 µs for each block.
        yield from (array[start : start + READ_AT_ONCE] for start in range(0, len(array), READ_AT_ONCE))
    else:
        yield from (block.to(wide).numpy(force=True) for block in torch.split(flat, READ_AT_ONCE))


def _row_of_block(block: Array, total: float, squares: float, low: float, high: float, nonzero: float) -> list[float]:
    """Return the row of a block from what was read of it, and read it again where that is not enough."""
    size = len(block)
    if low == high == 0:
        return [size, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, size, 0, 0]
    if not FAINT < squares < inf:  # Its squares over- or underflow, or it is not finite.
        row: list[float] = torch_ops.statistics_of_rows(torch.from_numpy(block).double().unsqueeze(0))[0].tolist()
        return row
    deviations = squares - total * total / size
    if total * total > FAR * size * deviations:
        apart = torch.from_numpy(block) - total / size
        rest = apart.sum().item()  # what rounding the mean to the block's dtype left
        deviations = torch.dot(apart, apart).item() - rest * rest / size
    std = sqrt(max(deviations, 0.0) / max(size - 1, 1))
    return [size, total / size, std, low, high, max(-low, high), sqrt(squares), size - nonzero, 0, 0]


def _merge_blocks(rows: list[list[float]]) -> list[float]:
    """Return the row of a tensor: the deviations within its blocks, and those of their means from its mean."""
    if len(rows) == 1:
        return rows[0]
    counts, means, stds, lows, highs, _, norms, *others = zip(*rows, strict=True)
    count, (zeros, nans, infs) = sum(counts), map(sum, others)
    mean = sum(map(mul, counts, means)) / count
    # A product of floats may become infinite; a power would raise instead.
    within = sum(std * std * (size - 1) for std, size in zip(stds, counts, strict=True))
    between = sum((one - mean) * (one - mean) * size for one, size in zip(means, counts, strict=True))
    std = sqrt((within + between) / max(count - 1, 1)) if isfinite(mean) else nan
    low, high = (nan, nan) if nans else (min(lows), max(highs))
    return [count, mean, std, low, high, max(-low, high), sqrt(sum(map(mul, norms, norms))), zeros, nans, infs]


# ---- norms alone -----------------------------------------------------------------------------------------------------


def norms(tensors: Sequence[Tensor], meta: TensorMeta) -> Tensor:
    """Return the L2 norm of each tensor, in less than half the time of all statistics."""
    # A list, because in the middle of training NumPy's operations on a few dozen numbers take longer than a loop.
    plan, found = plan_for(meta), [0.0] * len(tensors)
    if plan.unlike:
        # torch reads each tensor in place: in training that takes half the time of copies and NumPy's products.
        some = [tensors[index] for index in plan.unlike]
        some = [tensor.to(wide_dtype(tensor.dtype)) for tensor in some] if plan.convert_for_norm else some
        # torch adds up memory with gaps element by element, which costs digits in float32.
        dtype = plan.norm_dtype if all(map(Tensor.is_contiguous, some)) else torch.float64
        for index, norm in zip(plan.unlike, torch._foreach_norm(some, 2, dtype), strict=True):
            found[index] = norm.item()
    for chunk in plan.chunks:
        if chunk.alike:
            values = _values_of_chunk([tensors[index] for index in chunk.indices], chunk)
            with np.errstate(over="ignore", invalid="ignore"):
                squares = _squares_of_rows(values.reshape(len(chunk.indices), -1))
            for index, square in zip(chunk.indices, squares.tolist(), strict=True):
                found[index] = sqrt(square)
    for index in plan.large:
        # Large tensors are taken in blocks: over millions of elements float32 loses digits.
        blocks = torch.split(tensors[index].contiguous().view(-1), BLOCK)
        wide = (block.to(wide_dtype(block.dtype)) for block in blocks)
        found[index] = sqrt(sum(torch.dot(block, block).item() for block in wide))
    for index, number in enumerate(found):
        if not _FAINT_NORM < number < inf:  # over- or underflown in float32
            found[index] = tensors[index].double().square().sum().sqrt().item()
    return torch.tensor(found, dtype=torch.float64)
