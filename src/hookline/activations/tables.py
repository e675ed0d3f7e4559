"""What a monitor has measured, as one table a step; names are looked up only when somebody reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class StepTable(NamedTuple):
    """The numbers of one step on the host: ``values[i, j]`` is column j of module ``names[i]``.

    A table of histograms has one dimension more, the bins. Where there are no steps, a name stands once for each call.
    """

    step: int
    names: Sequence[str]
    columns: tuple[str, ...]
    values: Tensor
    totals: Mapping[str, float] = {}  # numbers over all modules, by name

    def of(self, name: str) -> Iterator[dict[str, float]]:
        """The values of one module, once for each time its name stands here."""
        for place, known in enumerate(self.names):
            if known == name:
                yield dict(zip(self.columns, self.values[place].tolist(), strict=True))

    def over(self, names: Sequence[str]) -> Tensor:
        """The values with one row for each of the names, NaN where this step has none."""
        if tuple(self.names) == tuple(names):
            return self.values
        places = {name: place for place, name in enumerate(names)}
        whole = self.values.new_full((len(names), *self.values.shape[1:]), float("nan"))
        whole[[places[name] for name in self.names]] = self.values
        return whole


class Source(Protocol):
    """One kind of numbers: taken while the model runs, given as tables once a step is complete."""

    def end_step(self, step: int) -> None:
        """Nothing more comes for this step."""

    def complete(self, wait: bool) -> Iterator[StepTable]:
        """The tables of complete steps, oldest first, each once; `wait` says whether to wait for the device."""

    def under_way(self) -> list[StepTable]:
        """What has arrived of a step that is not complete."""

    def discard(self) -> None:
        """Let go of the tensors that were gathered."""


class Tables:
    """The tables of the last steps, oldest first; of each kind, so many values of each module are kept."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._tables: deque[StepTable] = deque()
        self._rows: dict[tuple[str, ...], int] = {}  # by columns: each kind makes way for its own

    def add(self, table: StepTable) -> None:
        """Keep one more; the oldest of its kind makes way."""
        self._tables.append(table)
        kind, enough = table.columns, self._kept * len(set(table.names))
        rows = self._rows.get(kind, 0) + len(table.names)
        while rows - len(self._tables[place := self._oldest(kind)].names) >= enough:
            rows -= len(self._tables[place].names)
            del self._tables[place]
        self._rows[kind] = rows

    def _oldest(self, kind: tuple[str, ...]) -> int:
        return next(place for place, table in enumerate(self._tables) if table.columns == kind)

    def latest(self, under_way: Sequence[StepTable] = ()) -> dict[str, dict[str, float]]:
        """The newest values of every module; `under_way` are tables of a step that is not complete yet."""
        newest: dict[str, dict[str, float]] = {}
        seen: set[tuple[str, tuple[str, ...]]] = set()
        for table in reversed([*self._tables, *under_way]):
            for place in reversed(range(len(table.names))):
                name = table.names[place]
                if (name, table.columns) not in seen:
                    seen.add((name, table.columns))
                    values = dict(zip(table.columns, table.values[place].tolist(), strict=True))
                    newest[name] = values | newest.get(name, {})
        return newest

    def history(self, name: str, under_way: Sequence[StepTable] = ()) -> list[tuple[int, dict[str, float]]]:
        """(step, values) of one module, oldest first; what was measured apart in one step stands together."""
        entries: list[tuple[int, dict[str, float]]] = []
        of_step: dict[int, dict[str, float]] = {}
        for table in (*self._tables, *under_way):
            for values in table.of(name):
                known = of_step.get(table.step) if table.step else None
                if known is not None and known.keys().isdisjoint(values):
                    known.update(values)
                else:
                    of_step[table.step] = values
                    entries.append((table.step, values))
        return entries[-self._kept :]


def means(entries: Sequence[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """The mean of each number over the entries of a history; NaN is left out."""
    seen: dict[str, list[float]] = {}
    for _, values in entries:
        for column, value in values.items():
            seen.setdefault(column, []).append(value)
    return {column: torch.tensor(values, dtype=torch.float64).nanmean().item() for column, values in seen.items()}
