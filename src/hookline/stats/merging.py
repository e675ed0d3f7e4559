"""Putting rows together: the statistics of a whole from those of its parts."""

from __future__ import annotations

import torch
from torch import Tensor

from hookline.stats.columns import ABSMAX, COUNT, L2, MAX, MEAN, MIN, STD, ZEROS


def merge(rows: Tensor) -> Tensor:
    """The row of a whole from its parts' rows, which lie along the first dimension: [parts, …, statistics].

    Exact up to rounding, by the formula of Chan, Golub and LeVeque. The parts may be blocks of a tensor or, gathered
    from all ranks, the local shards of a distributed one. Empty parts count for nothing.
    """
    count = rows[..., COUNT]
    some = count > 0
    total = count.sum(0)
    means = torch.where(some, rows[..., MEAN], 0.0)
    mean = (count * means).sum(0) / total
    within = torch.where(some, rows[..., STD].square() * (count - 1), 0.0)
    deviations = (within + count * (means - mean).square()).sum(0)
    merged = torch.empty_like(rows[0])
    merged[..., COUNT] = total
    merged[..., MEAN] = mean
    merged[..., STD] = (deviations / (total - 1).clamp(min=1)).sqrt()
    merged[..., MIN] = torch.where(some, rows[..., MIN], float("inf")).amin(0)
    merged[..., MAX] = torch.where(some, rows[..., MAX], float("-inf")).amax(0)
    merged[..., ABSMAX] = torch.where(some, rows[..., ABSMAX], 0.0).amax(0)
    merged[..., MIN : ABSMAX + 1].masked_fill_((total == 0).unsqueeze(-1), float("nan"))
    merged[..., L2] = torch.linalg.vector_norm(rows[..., L2], dim=0)
    merged[..., ZEROS:] = rows[..., ZEROS:].sum(0)
    return merged
