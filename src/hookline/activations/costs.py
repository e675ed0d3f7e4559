"""What each module's forward costs, added up over the calls of a step."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hookline.activations.tables import StepTable


class Costs:
    """Time and memory of calls, as one table a step; without steps, as one a call."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        self._columns = columns
        self._step = 0
        self._open: dict[str, list[float]] = {}
        self._closed: list[StepTable] = []

    def add(self, name: str, seconds: float, memory: int, step: int) -> None:
        """Note one call."""
        if step != self._step or not step:
            self.end_step(self._step)
        self._step = step
        values = [seconds if column == "time" else float(memory) for column in self._columns]
        known = self._open.get(name)
        self._open[name] = values if known is None else [old + new for old, new in zip(known, values, strict=True)]

    def end_step(self, step: int) -> None:
        """Nothing more comes for this step."""
        self._closed += self.under_way()
        self._open = {}

    def complete(self, wait: bool) -> Iterator[StepTable]:
        """The tables of complete steps, oldest first, each once; there is no device to wait for."""
        closed, self._closed = self._closed, []
        yield from closed

    def under_way(self) -> list[StepTable]:
        """What the step under way has cost so far."""
        if not self._open:
            return []
        values = torch.tensor(list(self._open.values()), dtype=torch.float64)
        return [StepTable(self._step, tuple(self._open), self._columns, values)]

    def discard(self) -> None:
        """There are no tensors to let go of."""
