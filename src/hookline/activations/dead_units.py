"""Dead units: which channels of a module were never above zero, for any sample of a window of steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hookline.activations.tables import StepTable
from hookline.errors import ConfigError
from hookline.stats.flush import Arrival, Flush

COLUMNS = ("dead_units", "units")


class DeadUnits:
    """Keeps the highest value of every unit, on its device, and judges at the end of each window.

    Units lie along the last dimension, those of images (four dimensions and more) along the second; `unit_dim` says
    otherwise. NaN is trouble of another kind: such a unit is not called dead.
    """

    def __init__(self, window: int, unit_dim: int | None = None) -> None:
        if window < 1:
            raise ConfigError("dead_window", f"{window!r} is no number of steps; give 1 or more")
        self._window, self._unit_dim = window, unit_dim
        self._highest: dict[str, Tensor] = {}
        self._steps = 0
        self._flush = Flush()
        self._judged: dict[str, Tensor] = {}

    def add(self, name: str, output: Tensor) -> None:
        """Look at one output of a module."""
        if output.dim() == 0 or output.numel() == 0:
            return
        highest, known = self._of_units(output.detach()), self._highest.get(name)
        if known is not None and known.shape == highest.shape:
            highest = torch.maximum(known.to(highest.device), highest)
        self._highest[name] = highest

    def end_step(self, step: int) -> None:
        """Count the step; the last one of a window closes it."""
        self._steps += 1
        if self._steps >= self._window:
            self._judge(step)
            self._highest, self._steps = {}, 0

    def complete(self, wait: bool) -> Iterator[StepTable]:
        """The verdicts over complete windows, each at its window's last step."""
        for arrival in self._flush.drain() if wait else self._flush.ready():
            dead = _by_module(arrival)
            self._judged.update(dead)
            yield _counted(arrival.step, dead)

    def under_way(self) -> list[StepTable]:
        """While no window is complete, the verdict over what has been seen."""
        dead = {} if self._judged else self._so_far()
        return [_counted(0, dead)] if dead else []

    def of(self) -> dict[str, Tensor]:
        """Per module, which of its units are dead: in the last complete window, else in what has been seen."""
        return self._judged or self._so_far()

    def discard(self) -> None:
        """Let go of the open window."""
        self._highest = {}

    def state_dict(self) -> dict[str, Any]:
        """The open window."""
        return {"highest": dict(self._highest), "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a window."""
        self._highest, self._steps = dict(state["highest"]), state["steps"]

    def _of_units(self, output: Tensor) -> Tensor:
        default = 1 if output.dim() >= 4 else -1
        unit_dim = (default if self._unit_dim is None else self._unit_dim) % output.dim()
        others = [dim for dim in range(output.dim()) if dim != unit_dim]
        return output.amax(dim=others) if others else output.clone()

    def _judge(self, step: int) -> None:
        """Send the verdict on its way to the host, one copy per device."""
        by_device: dict[torch.device, list[str]] = {}
        for name, highest in self._highest.items():
            by_device.setdefault(highest.device, []).append(name)
        for names in by_device.values():
            sizes = [(name, len(self._highest[name])) for name in names]
            self._flush.send(step, sizes, torch.cat([self._highest[name] for name in names]) <= 0)

    def _so_far(self) -> dict[str, Tensor]:
        return {name: (highest <= 0).cpu() for name, highest in self._highest.items()}


def _by_module(arrival: Arrival) -> dict[str, Tensor]:
    sizes: Any = arrival.keys
    flags = torch.split(arrival.rows, [size for _, size in sizes])
    return {name: dead for (name, _), dead in zip(sizes, flags, strict=True)}


def _counted(step: int, dead: dict[str, Tensor]) -> StepTable:
    """How many units are dead, and of how many."""
    values = torch.tensor([[float(flags.sum()), float(len(flags))] for flags in dead.values()], dtype=torch.float64)
    return StepTable(step, tuple(dead), COLUMNS, values)
