"""Compute statistics and norms of tensors on the CPU, as rows of matrices that stay in the cache while they are read.

Tensors of one shape and dtype are stacked, because for a few thousand elements calling an operation costs more than its
work; large tensors are read in blocks. Only operations are used that run at the speed of the memory: `var_mean`,
`aminmax`, `isnan` and comparisons each take 15 to 100 times as long as one sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hookline.stats.columns import FAINT, FAR, wide_dtype
from hookline.stats.merge import merge
from hookline.stats.tensor_meta import SHAPE_AND_DTYPE, indices_by
from hookline.stats.torch_ops import statistics_of_rows

BLOCK = 131072  # elements that are read at once, for each torch thread; 512 KB as float32
MOST_THREADS = 16  # This keeps temporary memory small, and a block below the 2^24 to which float32 can count.


def summarize(tensors: Sequence[Tensor]) -> Tensor:
    """Return one statistics row per tensor."""
    totals, squares, nonzero, low, high = _measure(tensors, _sums_of_rows, _join_sums).unbind(1)
    count = torch.tensor(list(map(Tensor.numel, tensors)), dtype=torch.float64, device="cpu")
    mean, absmax, zeros, none = totals / count, torch.maximum(-low, high), count - nonzero, torch.zeros_like(count)
    deviations = squares - mean * totals
    std = (deviations / (count - 1).clamp(min=1)).sqrt()
    rows = torch.stack([count, mean, std, low, high, absmax, squares.sqrt(), zeros, none, none], dim=1)
    # The sums are not enough for tensors that are far from zero, faint or not finite; a NaN makes comparisons false.
    sound = (FAR * deviations >= mean * totals) & (squares < torch.inf) & ((squares > FAINT) | (low == high))
    if not sound.all():
        again = (~sound).nonzero().flatten().tolist()
        rows[again] = _measure([tensors[i] for i in again], lambda rows: statistics_of_rows(rows.double()), merge)
    return rows


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of each tensor, in about half the time of all statistics."""
    squares = _measure(tensors, lambda rows: rows.square().sum(1), _add_up)
    sound = (squares > FAINT) & (squares < torch.inf)
    if not sound.all():  # They may be over- or underflown in float32.
        again = (~sound).nonzero().flatten().tolist()
        squares[again] = _measure([tensors[i] for i in again], lambda rows: rows.double().square().sum(1), _add_up)
    return squares.sqrt()


def _measure(
    tensors: Sequence[Tensor], measure: Callable[[Tensor], Tensor], join: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the measurement of each tensor in float64.

    Args:
        tensors: Plain tensors on the CPU.
        measure: Takes a float32 or float64 matrix and measures each of its rows.
        join: Returns the measurement of a large tensor from those of its blocks.
    """
    order, found = [], []
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
            found.append(parts[0] if len(parts) == 1 else join(torch.stack(parts).double()))
    measured = torch.cat(found).double()
    return torch.empty_like(measured).index_copy_(0, torch.tensor(order, device="cpu"), measured)


def _sums_of_rows(rows: Tensor) -> Tensor:
    """Return total, sum of squares, number of nonzero elements, minimum and maximum of each row; NaN if it is empty."""
    if not rows.shape[1]:
        return rows.new_full((len(rows), 5), torch.nan)
    sums = [rows.sum(1), rows.square().sum(1), rows.sign().square_().sum(1)]
    return torch.stack([*sums, rows.amin(1), rows.amax(1)], dim=1)


def _join_sums(parts: Tensor) -> Tensor:
    return torch.cat([parts[..., :3].sum(0), parts[..., 3:4].amin(0), parts[..., 4:].amax(0)], dim=1)


def _add_up(parts: Tensor) -> Tensor:
    return parts.sum(0)
