"""The path of torch operations: every device that has no kernels of ours, and what is odd on the CPU.

Tensors of equal shape and dtype are stacked and reduced together, row by row, so that hundreds of small parameters cost
a few dozen operations instead of thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from hookline.stats.columns import STATISTICS, row_dtype, wide_dtype

_KIND = attrgetter("shape", "dtype")


def summarize(tensors: Sequence[Tensor]) -> Tensor:
    """One row of statistics per tensor, for tensors that are all on one device."""
    device = tensors[0].device
    rows = torch.empty((len(tensors), len(STATISTICS)), dtype=row_dtype(device), device=device)
    for indices in alike(tensors).values():
        rows[_table(indices, device)] = statistics_of_rows(stacked([tensors[index] for index in indices]))
    return rows


def alike(tensors: Sequence[Tensor]) -> dict[tuple[torch.Size, torch.dtype], list[int]]:
    """The places of the tensors that have the same shape and dtype."""
    kinds = list(map(_KIND, tensors))
    if len(set(kinds)) == 1:
        return {kinds[0]: list(range(len(kinds)))}
    places: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
    for index, kind in enumerate(kinds):
        places.setdefault(kind, []).append(index)
    return places


def stacked(alike: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape and dtype as the rows of a matrix, in the precision to compute in."""
    matrix = torch.stack(tuple(alike)).reshape(len(alike), alike[0].numel())
    return matrix.to(wide_dtype(matrix.dtype))


def _table(indices: list[int], device: torch.device) -> Tensor:
    """The indices on the device; from pinned memory, or the host would wait for the copy."""
    return torch.tensor(indices, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def statistics_of_rows(wide: Tensor) -> Tensor:
    """One row of statistics for each row of a matrix of float32 or float64.

    The mean is taken first and the squares around it, so that a mean far from zero costs no digits.
    """
    size = wide.shape[1]
    mean = wide.mean(dim=1)
    std = ((wide - mean.unsqueeze(1)).square_().sum(dim=1) / max(size - 1, 1)).sqrt()
    l2 = wide.square().sum(dim=1).sqrt()  # vector_norm adds up one after the other and is off by 1e-4 for a million
    low, high = (wide.amin(dim=1), wide.amax(dim=1)) if size else (mean, mean)
    count = torch.full_like(mean, size, dtype=row_dtype(wide.device))
    columns = [count, mean, std if size else mean, low, high, torch.maximum(-low, high), l2]
    columns += [(wide == 0).sum(dim=1), wide.isnan().sum(dim=1), wide.isinf().sum(dim=1)]
    return torch.stack([column.to(count.dtype) for column in columns], dim=1)
