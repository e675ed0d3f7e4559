"""Moved to hookline.core.costs."""

from typing import Any

from hookline.core.costs import CostMonitor


def CostWatch(trainer: Any) -> CostMonitor:
    """Make the monitor of a trainer; until the trainer does it itself."""
    return CostMonitor(trainer, trainer.options.warn_above)
