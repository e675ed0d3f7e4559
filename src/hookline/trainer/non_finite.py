"""Notice NaN and infinity without waiting for the device: the first bad loss, and bad weights when the run ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hookline.gradients.local_storage import local_tensor


class LossWatch:
    """A sink of the run's record, where losses arrive on the host anyway: reports the first that is not finite."""

    def __init__(self, report: Callable[[float, int], None]) -> None:
        self._report = report

    def write_metrics(self, rows: Sequence[dict[str, Any]], /) -> None:
        """Look at the losses of the last steps."""
        for row in rows:
            if not math.isfinite(loss := row.get("train/loss", 0.0)):
                self._report(loss, row["step"])
                return

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
        found = {name for one in flags.values() for name, ok in zip(one, _read(one), strict=True) if not ok}
    return [name for name in parameters if name in found]


def _read(flags: Mapping[str, torch.Tensor]) -> list[bool]:
    found: list[bool] = torch.stack(list(flags.values())).tolist()
    return found
