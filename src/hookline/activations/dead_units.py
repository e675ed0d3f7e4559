"""Dead units: channels of a module that were never above zero, for any sample in a window of steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hookline import _checks
from hookline.activations.series import StepTable
from hookline.stats.collector import HostQueue


class DeadUnits:
    """Keeps the maximum of every unit on its device, and counts dead units at the end of each window.

    A unit that contains a NaN does not count as dead.

    Args:
        window: The number of steps in a window.
        unit_dim: The dimension of the units; by default the last one, for images (four or more dimensions) the second.
    """

    def __init__(self, window: int, unit_dim: int | None = None) -> None:
        self._window, self._unit_dim = _checks.integer(window, "dead_window", at_least=1), unit_dim
        self._maxima: dict[str, Tensor] = {}  # of the current window, by module
        self._steps = 0
        self._flush = HostQueue()
        self._last_window: dict[str, Tensor] = {}

    def add(self, name: str, output: Tensor) -> None:
        """Take the maxima of one output of a module."""
        if output.dim() == 0 or output.numel() == 0:
            return
        output = output.detach()
        default = 1 if output.dim() >= 4 else -1
        unit_dim = (default if self._unit_dim is None else self._unit_dim) % output.dim()
        others = [dim for dim in range(output.dim()) if dim != unit_dim]
        maxima = output.amax(dim=others) if others else output.clone()
        earlier = self._maxima.get(name)
        if earlier is not None and earlier.shape == maxima.shape:
            maxima = torch.maximum(earlier.to(maxima.device), maxima)
        self._maxima[name] = maxima

    def end_step(self, step: int) -> None:
        """Count the step; at the end of a window, start copying its result to the host, one copy per device."""
        self._steps += 1
        if self._steps < self._window:
            return
        by_device: dict[torch.device, dict[str, Tensor]] = {}
        for name, maxima in self._maxima.items():
            by_device.setdefault(maxima.device, {})[name] = maxima
        for tensors in by_device.values():
            sizes = [(name, len(maxima)) for name, maxima in tensors.items()]
            self._flush.send(step, sizes, torch.cat(list(tensors.values())) <= 0)
        self._maxima, self._steps = {}, 0

    def complete(self, wait: bool) -> Iterator[StepTable]:
        """Yield the counts of complete windows, each at its last step."""
        for arrival in self._flush.drain() if wait else self._flush.ready():
            sizes: Any = arrival.keys
            flags = torch.split(arrival.rows, [size for _, size in sizes])
            dead = {name: flag for (name, _), flag in zip(sizes, flags, strict=True)}
            self._last_window.update(dead)
            yield _count(arrival.step, dead)

    def incomplete(self) -> list[StepTable]:
        """Return the counts of the first window so far; nothing once a window is complete."""
        return [] if self._last_window or not self._maxima else [_count(0, self.by_module())]

    def by_module(self) -> dict[str, Tensor]:
        """Return which units are dead: in the last complete window, else in the first window so far."""
        return self._last_window or {name: (maxima <= 0).cpu() for name, maxima in self._maxima.items()}

    def discard(self) -> None:
        """Release the maxima of the current window."""
        self._maxima = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the current window."""
        return {"highest": dict(self._maxima), "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a window."""
        self._maxima, self._steps = dict(state["highest"]), state["steps"]


def _count(step: int, dead: dict[str, Tensor]) -> StepTable:
    counts = torch.tensor([[float(flags.sum()), float(len(flags))] for flags in dead.values()], dtype=torch.float64)
    return StepTable(step, tuple(dead), ("dead_units", "units"), counts)
