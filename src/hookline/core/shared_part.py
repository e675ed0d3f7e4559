"""`SharedPart`: numbers of one step that every rank hands in, to be recorded together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

Sizes = Mapping[str, tuple[int, int]]
"""How many maxima and how many sums there are, by name; the same for a name on all ranks."""


class SharedPart(Protocol):
    """Numbers of one step that a hook hands in for the exchange, such as statistics rows.

    Every rank hands in a part with the same key, or what the others have is left out. Their names may differ. Maxima
    are taken first: what is to be added up may depend on them, as the bins of a histogram do.
    """

    key: str
    """What it is: parts of the ranks with the same key belong together."""
    step: int
    epoch: int
    sizes: Sizes
    """The names that this rank has, in the order of its numbers."""

    def maxima(self) -> torch.Tensor:
        """Return the numbers whose maximum over the ranks is taken, float64 on the host; may wait for a device."""

    def sums(self, maxima: torch.Tensor) -> torch.Tensor:
        """Return the numbers to add up, float64 on the host, given the maxima over all ranks."""

    def finish(self, sizes: Sizes, maxima: torch.Tensor, sums: torch.Tensor) -> Mapping[str, float]:
        """Use what the ranks have together; called on every rank.

        Args:
            sizes: The names that any rank has.
            maxima: The maxima over the ranks, in their order.
            sums: The sums over the ranks, in their order.

        Returns:
            Metrics to record at the step.
        """
