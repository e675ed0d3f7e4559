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
from hookline.stats.columns import FAINT, L2, wide_dtype
from hookline.stats.cpu_path import BLOCK, plan_of
from hookline.stats.from_sums import Numbers
from hookline.stats.kinds import Kinds, kinds_of
from hookline.stats.small_tensors import squares_of_small
from hookline.stats.stacks import squares_of_rows
from hookline.stats.statistics import summarize


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
        squares = _squares(tensors, kinds)
        found = torch.from_numpy(np.sqrt(squares))
        for place in np.flatnonzero(~((squares > FAINT) & (squares < inf))).tolist():  # over- or underflown in float32
            found[place] = tensors[place].double().square().sum().sqrt()
        return found


def _squares(tensors: Sequence[Tensor], kinds: Kinds) -> Numbers:
    """The sum of squares of each, in float64."""
    stacked, small, large = plan_of(kinds)
    if stacked and len(stacked[0]) == len(tensors):
        return squares_of_rows(tensors)
    squares = np.empty(len(tensors))
    if small.places:
        squares[small.places] = squares_of_small(tensors, small)
    for places in stacked:
        squares[places] = squares_of_rows([tensors[place] for place in places])
    for place in large:
        squares[place] = _in_blocks(tensors[place].reshape(-1))
    return squares


def _in_blocks(flat: Tensor) -> float:
    """Over millions of elements float32 would lose digits."""
    if len(flat) > BLOCK:
        return sum(_in_blocks(part) for part in torch.split(flat, BLOCK))
    wide = flat.to(wide_dtype(flat.dtype))
    return torch.dot(wide, wide).item()
