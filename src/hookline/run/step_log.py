"""`StepLog`: the metrics of the last steps, when the record is flushed, and the first loss that is not finite."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from time import time
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hookline._console import logger
from hookline.core.base import hook_attribute

if TYPE_CHECKING:
    from hookline.run.step import Steps

LOSS, LR, GRAD_NORM = "train/loss", "train/lr", "train/grad_norm"
"""The metrics that steps record by themselves."""
FLUSH_STEPS, FLUSH_SECONDS = 47, 2.0  # a prime, so it rarely falls on the steps at which hooks are due


class StepLog:
    """Collects what steps record by themselves: loss, learning rate, gradient norm, and the losses of loaders.

    It is also a sink of this rank's metrics, where losses arrive on the host anyway: it announces the first that is not
    finite. Where reading a loss waits for nothing, the record is flushed after the step of such a loss. Losses on a
    device arrive when the record is flushed by the clock.
    """

    def __init__(self, run: Steps) -> None:
        self._run = run
        self._rows: list[tuple[int, int, str, Any, float]] = []
        self._announced = False  # whether a loss that is not finite was announced
        self._plan_flush()

    def add(self, name: str, value: Any) -> None:
        """Record a metric of the current step."""
        progress = self._run.progress
        self._rows.append((progress.step, progress.epoch, name, value, time()))

    def add_loss(self, loss: Tensor | float) -> None:
        """Record the loss of the current step; on the CPU it is read, which waits for nothing."""
        number = loss.item() if isinstance(loss, Tensor) and loss.is_cpu else loss
        self.add(LOSS, number)
        if isinstance(number, float) and not isfinite(number) and not self._announced:
            self.flush_at = 0
            self._run.request_boundary()

    def flush_if_due(self) -> None:
        """Write the record if it is time."""
        if self._run.progress.step >= self.flush_at or time() >= self.flush_by:
            self.flush()

    def flush(self, wait: bool = False) -> None:
        """Write what was recorded, without waiting for a device unless asked to."""
        self.write_rows()
        self._run.record.flush(wait=wait)
        self._run.stats.fold_chunks()
        self._run.cost_monitor.check()
        self._plan_flush()

    def write_metrics(self, rows: Sequence[dict[str, Any]], /) -> None:
        """Announce the first loss of the last steps that is not finite."""
        bad = (row for row in rows if not isfinite(row.get(LOSS, 0.0)))
        if self._announced or (row := next(bad, None)) is None:
            return
        run, step, loss, self._announced = self._run, row["step"], row[LOSS], True
        is_known = step == run.step and len(run.window()) <= 1
        run.note("non_finite_loss", step, batch_idx=run.progress.batch_idx if is_known else None, value=loss)
        entries = [entry for entry in run.hooks.entries() if entry.enabled]
        if not any(hook_attribute(entry.hook, "explains_non_finite") for entry in entries):
            words = "step %d: the loss is %s; to find the module it comes from: %s"
            logger.warning(words, step, loss, run.find_nan_by, of_rank=True)

    def write_rows(self) -> None:
        """Pass the metrics of the last steps to the record."""
        self._run.record.extend(self._rows)
        self._rows.clear()

    def _plan_flush(self) -> None:
        """Plan to write the record after a given step, or after the first step that ends after a given time."""
        self.flush_at, self.flush_by = self._run.progress.step + FLUSH_STEPS, time() + FLUSH_SECONDS
