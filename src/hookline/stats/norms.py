"""Norms of many tensors at once, on their device, for those who want nothing else.

On CUDA the launch that gives all statistics costs no more. On the CPU the norm alone takes less than half their time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
import torch
from torch import Tensor

from hookline.stats.checks import check
from hookline.stats.columns import FAINT, L2, row_dtype, wide_dtype
from hookline.stats.cpu_path import BLOCK
from hookline.stats.kinds import kinds_of
from hookline.stats.small_tensors import Numbers
from hookline.stats.stacks import squares_of_rows
from hookline.stats.statistics import summarize

_SMALL = 4096  # elements; up to here tensors alike are read together: a call costs more than what it does
_SMALL_HALF = 16384  # elements; the same for those that are brought into another precision anyway
_MIDDLING = 65536  # elements; beyond, a sum in float32 loses digits


def norms(tensors: Sequence[Tensor], names: Sequence[object] | None = None) -> Tensor:
    """The L2 norm of each tensor, as `summarize` has it; nothing waits for the device.

    >>> import torch
    >>> norms([torch.tensor([3.0, -4.0]), torch.zeros(2)]).tolist()
    [5.0, 0.0]
    """
    if not tensors or tensors[0].device.type != "cpu" or not (kinds := kinds_of(tensors)).plain:
        return summarize(tensors, names)[:, L2]
    if not kinds.alike:
        check(tensors, names)  # they may be on several devices
    with torch.no_grad():
        if len(kinds.places_alike) == 1:
            return _norms_alike(tensors)
        found = torch.empty(len(tensors), dtype=row_dtype(tensors[0].device))
        for places in kinds.places_alike:
            found[places] = _norms_alike([tensors[place] for place in places])
        return found


def _norms_alike(alike: Sequence[Tensor]) -> Tensor:
    """Of tensors of one shape and dtype; where the squares over- or underflow in float32, taken again in float64."""
    squares = _squares(alike, alike[0].numel())
    found, sound = torch.from_numpy(np.sqrt(squares)), (squares > FAINT) & (squares < inf)
    for place in np.flatnonzero(~sound).tolist():
        found[place] = alike[place].double().square().sum().sqrt()
    return found


def _squares(alike: Sequence[Tensor], size: int) -> Numbers:
    """The sum of squares of each, in float64."""
    is_wide = alike[0].dtype is wide_dtype(alike[0].dtype)
    if 0 < size <= (_SMALL if is_wide else _SMALL_HALF):
        return squares_of_rows(alike)
    if is_wide and size <= _MIDDLING:
        return _products(alike)
    return np.array([_in_blocks(tensor.reshape(-1)) for tensor in alike], np.float64)


def _products(alike: Sequence[Tensor]) -> Numbers:
    """Each with itself, by NumPy, whose calls take a third of the time of torch's."""
    flats = [tensor.numpy(force=True).ravel() for tensor in alike]
    with np.errstate(over="ignore", invalid="ignore"):  # it is seen in the numbers
        return np.fromiter(map(np.ndarray.dot, flats, flats), np.float64, len(flats))


def _in_blocks(flat: Tensor) -> float:
    """Over millions of elements float32 would lose digits."""
    if len(flat) > BLOCK:
        return sum(_in_blocks(part) for part in torch.split(flat, BLOCK))
    wide = flat.to(wide_dtype(flat.dtype))
    return torch.dot(wide, wide).item()
