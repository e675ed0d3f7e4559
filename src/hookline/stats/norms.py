"""Norms of many tensors at once, on their device, for those who want nothing else.

On CUDA the launch that gives all statistics costs no more. On the CPU the norm alone takes a fifth of their time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

from hookline.stats import torch_path
from hookline.stats.checks import check
from hookline.stats.columns import FAINT, L2, row_dtype, wide_dtype
from hookline.stats.cpu_path import BLOCK, stacked_in_scratch
from hookline.stats.statistics import summarize

_TINY = 1024  # elements; up to here tensors alike are read together: a call costs more than what it does
_SMALL = 4096  # elements; up to here also those that are brought into another precision anyway
_MIDDLING = 65536  # elements; beyond, torch's own norm, which adds up one after the other, loses digits
_TOGETHER = 131072  # elements that are read together at most, so that they stay in the cache


def norms(tensors: Sequence[Tensor], names: Sequence[object] | None = None) -> Tensor:
    """The L2 norm of each tensor, as `summarize` has it; nothing waits for the device.

    >>> import torch
    >>> norms([torch.tensor([3.0, -4.0]), torch.zeros(2)]).tolist()
    [5.0, 0.0]
    """
    if not tensors or tensors[0].device.type != "cpu":
        return summarize(tensors, names)[:, L2]
    check(tensors, names)
    with torch.no_grad():
        groups = torch_path.alike(tensors).values()
        if len(groups) == 1:
            return _norms_alike(tensors)
        found = torch.empty(len(tensors), dtype=row_dtype(tensors[0].device))
        for indices in groups:
            found[indices] = _norms_alike([tensors[index] for index in indices])
        return found


def _norms_alike(alike: Sequence[Tensor]) -> Tensor:
    """Of tensors of one shape and dtype; where the squares over- or underflow in float32, taken again in float64."""
    found = _measure(alike, alike[0].numel())
    sound = (found > sqrt(FAINT)) & found.isfinite()
    for index in (~sound).nonzero().flatten().tolist():
        found[index] = alike[index].double().square().sum().sqrt()
    return found


def _measure(alike: Sequence[Tensor], size: int) -> Tensor:
    if _TINY < size <= _MIDDLING and alike[0].dtype is wide_dtype(alike[0].dtype):
        return torch.stack(torch._foreach_norm(list(alike))).double()
    if not 0 < size <= _SMALL:
        return torch.tensor([sqrt(_squares(tensor.reshape(-1))) for tensor in alike], dtype=torch.float64)
    many = _TOGETHER // size
    return torch.cat([_together(alike[start : start + many]) for start in range(0, len(alike), many)])


def _together(alike: Sequence[Tensor]) -> Tensor:
    wide, _ = stacked_in_scratch(alike, _TOGETHER)
    norms: Tensor = torch.linalg.vector_norm(wide, dim=1).double()
    return norms


def _squares(flat: Tensor) -> float:
    """The sum of squares, in blocks: over millions of elements float32 would lose digits."""
    if len(flat) > BLOCK:
        return sum(_squares(part) for part in torch.split(flat, BLOCK))
    wide = flat.to(wide_dtype(flat.dtype))
    return torch.dot(wide, wide).item()
