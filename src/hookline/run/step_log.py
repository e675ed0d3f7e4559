"""`StepLog`: the metrics of the last steps, and when the record is flushed (`FLUSH_STEPS`, `FLUSH_SECONDS`)."""

from __future__ import annotations

from math import isfinite
from time import time
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from hookline.run.run import Run

FLUSH_STEPS, FLUSH_SECONDS = 47, 2.0  # a prime: it seldom falls on the steps at which hooks are due


class StepLog:
    """Collects what steps record by themselves: loss, learning rate, gradient norm, and the losses of loaders."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._rows: list[tuple[int, int, str, Any, float]] = []
        self._had_bad_loss = False  # whether a loss that was read was not finite
        self.flush_at, self.flush_by = 0, 0.0
        """The record is written after this step, or after the first step that ends at this time."""
        self._plan_flush()

    def add(self, name: str, value: Any) -> None:
        """Record a metric of the current step."""
        progress = self._run.progress
        self._rows.append((progress.step, progress.epoch, name, value, time()))

    def add_loss(self, loss: Tensor | float) -> None:
        """Record the loss of the current step; on the CPU it is read, which waits for nothing.

        The first loss that is not finite is written after the current step, because that announces it.
        """
        number = loss.item() if isinstance(loss, Tensor) and loss.is_cpu else loss
        progress = self._run.progress
        self._rows.append((progress.step, progress.epoch, "train/loss", number, time()))
        if isinstance(number, float) and not isfinite(number) and not self._had_bad_loss:
            self._had_bad_loss, self.flush_at = True, 0
            self._run.request_boundary()

    def flush_if_due(self) -> None:
        """Write the record if it is time to do so."""
        if self._run.progress.step >= self.flush_at or time() >= self.flush_by:
            self.flush()

    def flush(self, wait: bool = False) -> None:
        """Write what was recorded, without waiting for a device unless asked to."""
        self.write_rows()
        self._run.record.flush(wait=wait)
        self._run.stats.fold_chunks()
        self._run.cost_monitor.check()
        self._plan_flush()

    def write_rows(self) -> None:
        """Pass the metrics of the last steps to the record."""
        self._run.record.extend(self._rows)
        self._rows.clear()

    def _plan_flush(self) -> None:
        self.flush_at, self.flush_by = self._run.progress.step + FLUSH_STEPS, time() + FLUSH_SECONDS
