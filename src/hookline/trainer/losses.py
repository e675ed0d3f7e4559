"""Losses stay on their device; they are folded into an epoch's mean now and then and read only when asked for."""

from __future__ import annotations

import math
from typing import Any

import torch

from hookline.trainer.epoch_means import EpochMeans


class LossBook:
    """The losses of one epoch."""

    def __init__(self, beside: EpochMeans | None = None) -> None:
        self.recent: list[torch.Tensor] = []  # detached losses that are not in the sums yet; the loop appends here
        self._count = 0
        self._sum: torch.Tensor | float = 0.0
        self._bad: torch.Tensor | int = 0
        self.beside = beside or EpochMeans()

    def fold(self) -> None:
        """Add the recent losses to the sums, where they are: on a device that is not the host nothing waits."""
        self.beside.fold()
        if self.recent and self.recent[0].is_cpu:
            self._fold_on_host()
        elif self.recent:
            stacked = torch.stack(self.recent).double()
            self._sum = self._sum + stacked.sum()
            self._bad = self._bad + (~torch.isfinite(stacked)).sum()
            self._count += len(self.recent)
            self.recent.clear()

    def _fold_on_host(self) -> None:
        """The same with one operation instead of eight; added one by one, so that nobody sees when it was done."""
        if self.recent:
            losses, total = torch.stack(self.recent).tolist(), float(self._sum)
            for loss in losses:
                total += loss
            self._sum = total
            self._bad = int(self._bad) + sum(not math.isfinite(loss) for loss in losses)
            self._count += len(losses)
            self.recent.clear()

    def mean(self) -> float:
        """The epoch's mean so far; nan before the first batch. Waits for the device."""
        self._fold_on_host()
        return float(self._sum) / self._count if self._count else math.nan

    def take_non_finite(self) -> int:
        """How many losses were NaN or infinite since this was last asked. Waits for the device."""
        self.fold()
        count, self._bad = int(self._bad), 0
        return count

    def state_dict(self) -> dict[str, Any]:
        """The sums so far, as numbers. Waits for the device."""
        self.fold()
        beside = self.beside.state_dict()
        return {"count": self._count, "sum": float(self._sum), "bad": int(self._bad), "beside": beside}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from those sums."""
        self.recent.clear()
        self._count, self._sum, self._bad = int(state["count"]), state["sum"], int(state["bad"])
        self.beside.load_state_dict(state.get("beside", {}))
