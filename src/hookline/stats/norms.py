"""Norms of many tensors at once, on their device, for those who want nothing else.

On CUDA the launch that gives all statistics costs no more. On the CPU the norm alone takes less than half their time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt

import numpy as np
import torch
from torch import Tensor

from hookline.stats.columns import FAINT, L2, wide_dtype
from hookline.stats.cpu_path import BLOCK, plan_of
from hookline.stats.kinds import Kinds, kinds_of
from hookline.stats.small_tensors import norms_of_small
from hookline.stats.stacks import squares_of_rows
from hookline.stats.statistics import summarize

_FAINT = sqrt(FAINT)


def norms(tensors: Sequence[Tensor], names: Sequence[object] | None = None, kinds: Kinds | None = None) -> Tensor:
    """The L2 norm of each tensor, as `summarize` has it; nothing waits for the device.

    Small ones are added up in float32: where all values are alike, of ten thousand or more, it is five digits.

    >>> import torch
    >>> norms([torch.tensor([3.0, -4.0]), torch.zeros(2)]).tolist()
    [5.0, 0.0]
    """
    if tensors and kinds is None and tensors[0].is_cpu:
        kinds = kinds_of(tensors)
    if not tensors or kinds is None or not (kinds.plain and kinds.on_cpu):
        return summarize(tensors, names)[:, L2]
    if not kinds.in_graph:
        return _of_plain(tensors, kinds)
    with torch.no_grad():  # which takes 20 µs in the midst of other work
        return _of_plain(tensors, kinds)


def _of_plain(tensors: Sequence[Tensor], kinds: Kinds) -> Tensor:
    found = _norms(tensors, kinds)
    for place, norm in enumerate(found):
        if not _FAINT < norm < inf:  # over- or underflown in float32
            found[place] = tensors[place].double().square().sum().sqrt().item()
    return torch.tensor(found, dtype=torch.float64)


def _norms(tensors: Sequence[Tensor], kinds: Kinds) -> list[float]:
    """The norm of each; of many alike, stacked, and of large ones in blocks: over millions float32 loses digits."""
    stacked, small, large = plan_of(kinds)
    if len(small.places) == len(tensors):
        return norms_of_small(tensors, small)
    found = np.empty(len(tensors))
    if small.places:
        found[small.places] = norms_of_small(tensors, small)
    for places in stacked:
        found[places] = np.sqrt(squares_of_rows([tensors[place] for place in places]))
    for place in large:
        found[place] = sqrt(_squares_in_blocks(tensors[place].reshape(-1)))
    numbers: list[float] = found.tolist()
    return numbers


def _squares_in_blocks(flat: Tensor) -> float:
    if len(flat) > BLOCK:
        return sum(map(_squares_in_blocks, torch.split(flat, BLOCK)))
    wide = flat.to(wide_dtype(flat.dtype))
    return torch.dot(wide, wide).item()
