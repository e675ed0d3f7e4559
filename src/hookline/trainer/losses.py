"""Losses stay on their device; they are folded into an epoch's mean now and then and read only when asked for."""

from __future__ import annotations

import math

import torch

FOLD_EVERY = 256


class LossBook:
    """The losses of one epoch."""

    def __init__(self) -> None:
        self._recent: list[torch.Tensor] = []
        self._count = 0
        self._sum: torch.Tensor | float = 0.0
        self._bad: torch.Tensor | int = 0

    def add(self, loss: torch.Tensor) -> None:
        """One micro-batch's detached loss."""
        self._recent.append(loss)
        if len(self._recent) >= FOLD_EVERY:
            self._fold()

    def _fold(self) -> None:
        if self._recent:
            stacked = torch.stack([loss.double() for loss in self._recent])
            self._sum = self._sum + stacked.sum()
            self._bad = self._bad + (~torch.isfinite(stacked)).sum()
            self._count += len(self._recent)
            self._recent.clear()

    def mean(self) -> float:
        """The epoch's mean so far; nan before the first batch. Waits for the device."""
        self._fold()
        return float(self._sum) / self._count if self._count else math.nan

    def non_finite(self) -> int:
        """How many losses were NaN or infinite. Waits for the device."""
        self._fold()
        return int(self._bad)
