"""Compute statistics of many tensors at once, on their device: one row per tensor; and merge the rows of parts.

To add a statistic, name it in `STATISTICS`, compute it in `statistics_of_rows`, `_summarize_on_cpu` and `kernels`, and
merge it in `split_rows` and `join_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from importlib.util import find_spec

import torch
from torch import Tensor

from hookline import _device
from hookline._tensors import SHAPE_AND_DTYPE, TensorMeta, indices_by, is_sharded, tensor_meta
from hookline.errors import HooklineError

STATISTICS = ("count", "mean", "std", "min", "max", "absmax", "l2", "zeros", "nans", "infs")
"""The columns of every statistics row, in this order."""

COUNT, MEAN, STD, MIN, MAX, ABSMAX, L2, ZEROS, NANS, INFS = range(len(STATISTICS))

FAINT = 1e-24  # A smaller sum of squares has lost digits to the smallest numbers of float32.
FAR = 50.0  # Above this (mean / std)², squares are taken around the mean, which costs more passes over the data.
_CPU = torch.device("cpu")
BLOCK = 131072  # elements that are read at once on the CPU, for each torch thread; 512 KB as float32
MOST_THREADS = 16  # This keeps temporary memory small, and a block below the 2^24 to which float32 can count.


def row_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of rows: float64 counts exactly to 2^53, float32 only to 2^24, but MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: float32 if it holds every value of `dtype` exactly, otherwise float64."""
    exact_in_float32 = dtype.itemsize < 4 or dtype is torch.float32
    return torch.float32 if exact_in_float32 else torch.float64


def summarize(
    tensors: Sequence[Tensor], names: Sequence[object] | None = None, meta: TensorMeta | None = None
) -> Tensor:
    """Compute the statistics of each tensor; nothing waits for the device.

    Values follow torch: a NaN in a tensor makes its values NaN while the counts say how many there are, and std is
    unbiased. Two cases differ, because NaN is reserved for NaN in the tensor and for statistics that have no value: std
    of a single element is 0, and the extremes of an empty tensor are NaN instead of an error. Tensors may have any real
    dtype, shape and stride; fp16 and bf16 are summed in float32, int32, int64 and fp64 in float64.

    Args:
        tensors: Dense real tensors on one device.
        names: The name of each tensor in errors; "tensor 3" and so on by default.
        meta: `tensor_meta(tensors)`, if the caller already has it.

    Returns:
        One row per tensor and one column per name in `STATISTICS`, float64 on the tensors' device; the same call gives
        the same bits every time.

    Raises:
        HooklineError: If a tensor is sparse, complex, a DTensor or on a different device than the first.

    >>> import torch
    >>> row = summarize([torch.tensor([0.0, 3.0, -4.0])])[0]
    >>> dict(zip(STATISTICS, row.tolist()))["l2"]
    5.0
    """
    if not tensors:
        return torch.empty((0, len(STATISTICS)), dtype=row_dtype(_CPU))
    meta = meta or tensor_meta(tensors)
    if not meta.plain or len(meta.devices) > 1:
        check(tensors, names)
    with torch.no_grad():
        if tensors[0].is_cpu:
            # Subclasses, such as fake tensors, may have no readable values.
            return _summarize_on_cpu(tensors) if meta.plain else summarize_by_torch(tensors, torch.float64)
        if not has_kernels(tensors[0].device):
            return summarize_by_torch(tensors)
        from hookline.stats import cuda  # Imported only now, because it imports Triton.

        return cuda.summarize(tensors)


def norms(tensors: Sequence[Tensor], names: Sequence[object] | None = None, meta: TensorMeta | None = None) -> Tensor:
    """Compute only the L2 norm of each tensor, without waiting for the device.

    On CUDA a launch that gives all statistics costs no more; on the CPU norms take about half the time.

    Args:
        tensors: Tensors as `summarize` takes them.
        names: The name of each tensor in errors.
        meta: `tensor_meta(tensors)`, if the caller already has it.

    Returns:
        The norms, float64 on the tensors' device.

    Raises:
        HooklineError: As `summarize`.

    >>> import torch
    >>> norms([torch.tensor([3.0, -4.0]), torch.zeros(2)]).tolist()
    [5.0, 0.0]
    """
    meta = meta or tensor_meta(tensors)
    if not meta.plain or meta.devices != {_CPU}:
        return summarize(tensors, names, meta)[:, L2]
    add_up = partial(torch.sum, dim=0)
    with torch.no_grad():
        squares = _measure(tensors, lambda rows: rows.square().sum(1), add_up)
        sound = (squares > FAINT) & (squares < torch.inf)
        if not sound.all():  # They may have overflowed or underflowed in float32.
            again = (~sound).nonzero().flatten().tolist()
            squares[again] = _measure([tensors[i] for i in again], lambda rows: rows.double().square().sum(1), add_up)
        return squares.sqrt()


@lru_cache
def has_kernels(device: torch.device) -> bool:
    """Return whether the Triton kernels work on a device; torch operations are used elsewhere, or without Triton."""
    return _device.is_accelerator(device) and find_spec("triton") is not None


def check(tensors: Sequence[Tensor], names: Sequence[object] | None = None) -> None:
    """Raise for tensors that cannot be summarized together.

    Raises:
        HooklineError: For a sparse, complex or distributed tensor, and for tensors on several devices.
    """
    names = names or [f"tensor {index}" for index in range(len(tensors))]
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.layout is not torch.strided:
            problem = f"it has the layout {tensor.layout}; pass its values() or to_dense()"
        elif tensor.is_complex():
            problem = f"it is {tensor.dtype}; pass torch.view_as_real(tensor) or tensor.abs()"
        elif is_sharded(tensor):
            problem = "it is a DTensor; hookline.stats.distributed.LocalTensors measures it over all ranks"
        elif tensor.device != tensors[0].device:
            where = f"{name} is on {tensor.device}, but {names[0]} is on {tensors[0].device}"
            raise HooklineError(f"{where}: summarize the tensors of each device separately")
        else:
            continue
        raise HooklineError(f"no statistics of {name}: {problem}")


# ---- merging ---------------------------------------------------------------------------------------------------------
# A row is split into numbers that add up and numbers of which the largest counts. So parts can be merged on their
# device, or over ranks, by one sum and one maximum for any number of tensors.


def merge(rows: Tensor) -> Tensor:
    """Return the rows of wholes from those of their parts, [parts, …, statistics], exact up to rounding.

    The parts may be blocks of a tensor or, gathered from all ranks, the local shards of a distributed one. Empty parts
    count for nothing.
    """
    sums, peaks = split_rows(rows)
    return join_rows(sums.sum(0), peaks.amax(0))


def split_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Split rows into the numbers that add up over the parts of a whole, and those whose maximum counts.

    The spread is stored in two parts, within the part and of its mean, because otherwise a mean far from zero would
    cost digits.
    """
    count, nans = rows[..., COUNT], rows[..., NANS]
    mean = torch.where(count > 0, rows[..., MEAN], 0.0)
    within = torch.where(count > 0, rows[..., STD].square() * (count - 1), 0.0)
    sums = [count, count * mean, count * mean.square(), within, rows[..., L2].square(), rows[..., ZEROS], nans]
    extremes = torch.stack([-rows[..., MIN], rows[..., MAX]], dim=-1)
    some = ((count > 0) & (nans == 0)).unsqueeze(-1)  # A maximum over NaNs is not reliable.
    return torch.stack([*sums, rows[..., INFS]], dim=-1), torch.where(some, extremes, float("-inf"))


def join_rows(sums: Tensor, peaks: Tensor) -> Tensor:
    """Return the rows of wholes from the sums and maxima over what `split_rows` returned for their parts."""
    count, total, between, within, squares, zeros, nans, infs = sums.unbind(-1)
    mean = total / count
    # If the squares within the parts overflow, those of the means do too, and their difference would be NaN.
    deviations = torch.where(within.isinf(), within, within + between - total * mean).clamp(min=0)
    std = torch.where(count > 0, (deviations / (count - 1).clamp(min=1)).sqrt(), float("nan"))
    none = (count == 0) | (nans > 0)
    low, high = (torch.where(none, float("nan"), peak) for peak in (-peaks[..., 0], peaks[..., 1]))
    columns = [count, mean, std, low, high, torch.maximum(-low, high), squares.sqrt(), zeros, nans, infs]
    return torch.stack(columns, dim=-1)


# ---- devices without our kernels, and unusual values on the CPU ------------------------------------------------------
# Tensors of equal shape and dtype are stacked and reduced together, so that hundreds of small parameters need a few
# dozen operations instead of thousands.


def summarize_by_torch(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Return one statistics row per tensor, for tensors on one device; `dtype` is the precision to compute in."""
    device = tensors[0].device
    rows = torch.empty((len(tensors), len(STATISTICS)), dtype=row_dtype(device), device=device)
    for group in indices_by(SHAPE_AND_DTYPE, tensors):
        alike = torch.stack([tensors[index] for index in group]).reshape(len(group), tensors[group[0]].numel())
        wide = alike.to(dtype or wide_dtype(alike.dtype))
        rows[_device.upload(group, torch.int64, device)] = statistics_of_rows(wide)
    return rows


def statistics_of_rows(wide: Tensor) -> Tensor:
    """Return one statistics row for each row of a float32 or float64 matrix.

    The squares are taken around the mean, so that a mean far from zero costs no digits.
    """
    size = wide.shape[1]
    mean = wide.mean(dim=1)
    std = ((wide - mean.unsqueeze(1)).square_().sum(dim=1) / max(size - 1, 1)).sqrt()
    # vector_norm adds the elements one after the other and is off by 1e-4 for a million of them.
    l2 = wide.square().sum(dim=1).sqrt()
    low, high = (wide.amin(dim=1), wide.amax(dim=1)) if size else (mean, mean)
    count = torch.full_like(mean, size, dtype=row_dtype(wide.device))
    columns = [count, mean, std if size else mean, low, high, torch.maximum(-low, high), l2]
    columns += [(wide == 0).sum(dim=1), wide.isnan().sum(dim=1), wide.isinf().sum(dim=1)]
    return torch.stack([column.to(count.dtype) for column in columns], dim=1)


# ---- the CPU ---------------------------------------------------------------------------------------------------------
# Tensors are read as rows of matrices that stay in the cache. Tensors of one shape and dtype are stacked, because for a
# few thousand elements calling an operation costs more than its work; large tensors are read in blocks. Only operations
# are used that run at the speed of the memory: `var_mean`, `aminmax`, `isnan` and comparisons each take 15 to 100 times
# as long as one sum.


def _summarize_on_cpu(tensors: Sequence[Tensor]) -> Tensor:
    """Return one statistics row per tensor."""
    totals, squares, nonzero, low, high = _measure(tensors, _sums_of_rows, _join_sums).unbind(1)
    count = torch.tensor(list(map(Tensor.numel, tensors)), dtype=torch.float64, device="cpu")
    mean, absmax, zeros, none = totals / count, torch.maximum(-low, high), count - nonzero, torch.zeros_like(count)
    deviations = squares - mean * totals
    std = (deviations / (count - 1).clamp(min=1)).sqrt()
    rows = torch.stack([count, mean, std, low, high, absmax, squares.sqrt(), zeros, none, none], dim=1)
    # The sums are not enough for tensors that are far from zero, tiny or not finite; a NaN makes comparisons false.
    sound = (FAR * deviations >= mean * totals) & (squares < torch.inf) & ((squares > FAINT) | (low == high))
    if not sound.all():
        again = (~sound).nonzero().flatten().tolist()
        rows[again] = _measure([tensors[i] for i in again], lambda rows: statistics_of_rows(rows.double()), merge)
    return rows


def _measure(
    tensors: Sequence[Tensor], measure: Callable[[Tensor], Tensor], join: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the measurement of each tensor in float64.

    Args:
        tensors: Plain tensors on the CPU.
        measure: Takes a float32 or float64 matrix and measures each of its rows.
        join: Returns the measurement of a large tensor from those of its blocks.
    """
    order, results = [], []
    block = BLOCK * min(torch.get_num_threads(), MOST_THREADS)
    for group in indices_by(SHAPE_AND_DTYPE, tensors):
        order += group
        size, wide = tensors[group[0]].numel(), wide_dtype(tensors[group[0]].dtype)
        at_once = max(block // max(size, 1), 1)  # tensors
        for start in range(0, len(group), at_once):
            some = [tensors[index] for index in group[start : start + at_once]]
            rows = (some[0] if len(some) == 1 else torch.stack(some)).reshape(len(some), size)
            # Memory with gaps is added up element by element, which costs digits in float32.
            dtype = wide if rows.is_contiguous() else torch.float64
            parts = [measure(part.to(dtype)) for part in torch.split(rows, block, dim=1)]
            results.append(parts[0] if len(parts) == 1 else join(torch.stack(parts).double()))
    measured = torch.cat(results).double()
    return torch.empty_like(measured).index_copy_(0, torch.tensor(order, device="cpu"), measured)


def _sums_of_rows(rows: Tensor) -> Tensor:
    """Return total, sum of squares, number of nonzero elements, minimum and maximum of each row; NaN if it is empty."""
    if not rows.shape[1]:
        return rows.new_full((len(rows), 5), torch.nan)
    sums = [rows.sum(1), rows.square().sum(1), rows.sign().square_().sum(1)]
    return torch.stack([*sums, rows.amin(1), rows.amax(1)], dim=1)


def _join_sums(parts: Tensor) -> Tensor:
    return torch.cat([parts[..., :3].sum(0), parts[..., 3:4].amin(0), parts[..., 4:].amax(0)], dim=1)
