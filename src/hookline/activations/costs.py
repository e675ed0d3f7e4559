"""What each module's forward costs, added up over the calls of a step."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hookline.activations.tables import StepTable


class Costs:
    """Time and memory of calls, as one table a step; where there are no steps, each call has a row of its own."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        self._columns = columns
        self._step = 0
        self._names: list[str] = []
        self._values: list[list[float]] = []
        self._places: dict[str, int] = {}  # of the names, in the step under way
        self._closed: list[StepTable] = []

    def add(self, name: str, seconds: float, memory: int, step: int) -> None:
        """Note one call."""
        if step != self._step:
            self.end_step(self._step)
            self._step = step
        values = [seconds if column == "time" else float(memory) for column in self._columns]
        place = self._places.get(name) if step else None
        if place is None:
            self._places[name] = len(self._names)
            self._names.append(name)
            self._values.append(values)
        else:
            self._values[place] = [old + new for old, new in zip(self._values[place], values, strict=True)]

    def end_step(self, step: int) -> None:
        """Nothing more comes for this step."""
        self._closed += self.under_way()
        self._names, self._values, self._places = [], [], {}

    def complete(self, wait: bool) -> Iterator[StepTable]:
        """The tables of complete steps, oldest first, each once; there is no device to wait for."""
        if not self._step:  # nobody will end it
            self.end_step(0)
        closed, self._closed = self._closed, []
        yield from closed

    def under_way(self) -> list[StepTable]:
        """What the step under way has cost so far."""
        if not self._names:
            return []
        values = torch.tensor(self._values, dtype=torch.float64)
        return [StepTable(self._step, tuple(self._names), self._columns, values)]

    def discard(self) -> None:
        """There are no tensors to let go of."""
