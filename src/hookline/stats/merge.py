"""Merge statistics rows: the row of a whole from the rows of its parts.

A row is split into numbers that add up and numbers of which the largest counts. So parts can be merged where they are,
or over ranks, by one sum and one maximum for any number of tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hookline.stats.columns import COUNT, INFS, L2, MAX, MEAN, MIN, NANS, STD, ZEROS


def merge(rows: Tensor) -> Tensor:
    """Return the rows of wholes from those of their parts, [parts, …, statistics], exact up to rounding.

    The parts may be blocks of a tensor or, gathered from all ranks, the local shards of a distributed one. Empty parts
    count for nothing.
    """
    sums, peaks = split_rows(rows)
    return join_rows(sums.sum(0), peaks.amax(0))


def split_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Split rows into what adds up over the parts of a whole, and that of which the largest counts.

    The spread is stored as that within the part and that of its mean, or a mean far from zero would cost digits.
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
    # Where the squares within the parts overflow, those of the means do too, and their difference would be NaN.
    deviations = torch.where(within.isinf(), within, within + between - total * mean).clamp(min=0)
    std = torch.where(count > 0, (deviations / (count - 1).clamp(min=1)).sqrt(), float("nan"))
    none = (count == 0) | (nans > 0)
    low, high = (torch.where(none, float("nan"), peak) for peak in (-peaks[..., 0], peaks[..., 1]))
    columns = [count, mean, std, low, high, torch.maximum(-low, high), squares.sqrt(), zeros, nans, infs]
    return torch.stack(columns, dim=-1)
