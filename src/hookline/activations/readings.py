"""Outputs, or their gradients, on their way from gathered tensors to tables of statistics."""

from __future__ import annotations

from collections.abc import Iterator

from hookline.activations.tables import StepTable
from hookline.activations.wanted import Wanted
from hookline.errors import HooklineError, nearest
from hookline.stats.columns import INFS, NANS
from hookline.stats.histograms import Histograms
from hookline.stats.per_step import PerStep, StepRows
from hookline.stats.wide_rows import histograms_of


class Readings:
    """The chosen statistics of the tensors that are added; `prefix` tells their columns from those of others."""

    def __init__(self, wanted: Wanted, prefix: str = "") -> None:
        self._wanted, self._prefix = wanted, prefix
        self._columns = tuple(prefix + column for column in wanted.columns)
        self._gathered = PerStep(wanted.measure)
        self._newest: StepRows | None = None
        self.add = self._gathered.add
        self.send = self._gathered.send
        self.end_step = self._gathered.end_step
        self.discard = self._gathered.discard
        self.add_rows = self._gathered.add_rows

    def complete(self, wait: bool) -> Iterator[StepTable]:
        """The tables of complete steps; that of a step's histograms follows its own."""
        for rows in self._gathered.drain() if wait else self._gathered.ready():
            self._newest = rows
            yield from self._tables(rows)

    def under_way(self) -> list[StepTable]:
        """What has arrived of a step that is not complete."""
        rows = self._gathered.incomplete()
        return [] if rows is None else list(self._tables(rows))

    def histogram(self, name: str) -> Histograms:
        """The newest histogram of one module."""
        rows = self._gathered.incomplete() or self._newest
        names = [] if rows is None else rows.keys
        if rows is None or name not in names:
            raise HooklineError(f"nothing of {name!r} has been counted; {nearest(name, map(str, names))}")
        place = len(names) - 1 - names[::-1].index(name)  # the last, where there are several
        return histograms_of(rows.rows[place : place + 1])

    def _tables(self, rows: StepRows) -> Iterator[StepTable]:
        names = list(map(str, rows.keys))
        totals = {f"{self._prefix}non_finite": rows.rows[:, NANS : INFS + 1].sum().item()}
        yield StepTable(rows.step, names, self._columns, self._wanted.table(rows.rows), totals)
        if self._wanted.histogram:
            counts = histograms_of(rows.rows).counts.double().unsqueeze(1)
            yield StepTable(rows.step, names, (f"{self._prefix}counts",), counts)
