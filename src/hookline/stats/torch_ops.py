"""Compute statistics with torch operations: for devices without our kernels, and for unusual values on the CPU.

Tensors of equal shape and dtype are stacked and reduced together, so that hundreds of small parameters need a few dozen
operations instead of thousands.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hookline import _device
from hookline.stats.columns import STATISTICS, row_dtype, wide_dtype
from hookline.stats.tensor_meta import SHAPE_AND_DTYPE, indices_by


def summarize(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
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
