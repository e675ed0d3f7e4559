"""Notice NaN and infinity without waiting for a device: bad losses, and bad weights when the run ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hookline._console import logger
from hookline.core.base import hook_attribute
from hookline.gradients.local_storage import local_tensor

if TYPE_CHECKING:
    from hookline.run.run import Run


class LossWatch:
    """A sink of this rank's metrics, where losses arrive on the host anyway: announces the first that is not finite.

    Where reading a loss waits for nothing, the loop flushes the record at once after the step of such a loss. Losses on
    a device arrive by the clock.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._announced = run, False

    def write_metrics(self, rows: Sequence[dict[str, Any]], /) -> None:
        """Look at the losses of the last steps."""
        bad = (row for row in rows if not math.isfinite(row.get("train/loss", 0.0)))
        if self._announced or (row := next(bad, None)) is None:
            return
        run, step, loss, self._announced = self._run, row["step"], row["train/loss"], True
        is_known = step == run.step and len(run.window()) <= 1
        run.note("non_finite_loss", step, batch_idx=run.progress.batch_idx if is_known else None, value=loss)
        entries = [entry for entry in run.hooks.entries() if entry.enabled]
        if not any(hook_attribute(entry.hook, "explains_non_finite") for entry in entries):
            words = "step %d: the loss is %s; to find the module it comes from: %s"
            logger.warning(words, step, loss, run.find_nan_by, of_rank=True)

    def write_layers(self, rows: Sequence[Any], /) -> None:
        """Do nothing."""

    def write_events(self, rows: Sequence[dict[str, Any]], /) -> None:
        """Do nothing."""


def non_finite_parameters(parameters: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of parameters that hold a NaN or an infinity; waits for each device once."""
    flags: dict[torch.device, dict[str, torch.Tensor]] = {}
    with torch.no_grad():
        for name, parameter in parameters.items():
            try:
                local = local_tensor(parameter)
                flags.setdefault(local.device, {})[name] = torch.isfinite(local).all()
            except (RuntimeError, NotImplementedError):  # torch cannot tell for this dtype
                continue
        finite: dict[str, bool] = {}
        for some in flags.values():
            finite.update(zip(some, torch.stack([*some.values()]).tolist(), strict=True))
    return [name for name in parameters if not finite.get(name, True)]
