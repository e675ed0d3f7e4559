"""`SharedPart`: numbers of one step that every rank contributes, to be recorded together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Sizes = Mapping[str, tuple[int, int]]
"""By name, the number of maxima and of sums; equal on all ranks for a name."""


@dataclass
class SharedPart:
    """Numbers of one step that this rank contributes to the exchange, such as statistics rows.

    Every rank hands in a part of the same kind and step, otherwise the exchange leaves out the parts of the others. The
    names in it may differ. Maxima are taken first, because sums may depend on them, as the bins of a histogram do.
    """

    kind: str
    """The kind of the numbers; the same on all ranks."""
    step: int
    epoch: int
    sizes: Sizes
    """The names that this rank has, in the order of its numbers."""
    finish: Callable[[Sizes, Tensor, Tensor], Mapping[str, float]]
    """Uses the numbers of all ranks, on every rank: gets the names that any rank has, and the maxima and sums in their
    order. Returns metrics to record at the step."""
    maxima: Callable[[], Tensor] = lambda: torch.empty(0, dtype=torch.float64)
    """Returns the numbers whose maximum over the ranks is taken, float64 on the host; may wait for a device."""
    sums: Callable[[Tensor], Tensor] = lambda maxima: maxima[:0]
    """Gets the maxima over all ranks, and returns the numbers to add up, float64 on the host."""

    @property
    def key(self) -> str:
        """The properties that corresponding parts share on all ranks."""
        return f"{self.kind} {self.step}"
