"""Read histograms from the rows of layers.jsonl, with the octave in which the window of each ends; needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from hookline._bins import Doubles
from hookline.record.format import WINDOW_COLUMNS, Floats, SeriesHeader


class HistogramRow(NamedTuple):
    """The histograms of one step in one column of a series."""

    step: int
    series: str
    column: str
    names: tuple[str, ...]
    counts: Floats
    """[names, bins], as `hookline._bins` describes."""
    tops: Doubles | None
    """The octave in which each window ends; None for series whose bins are unknown, because no monitor wrote them."""

    has_columns: bool
    """Whether the series has several columns, as that of a monitor of outputs and of their gradients."""


class HistogramReader:
    """Takes the rows of layers.jsonl in their order, and returns the histograms in them.

    Where the bins of a monitor end is in its statistics row of the same step. A histogram without it, as a kill may
    leave one, is left out.
    """

    def __init__(self) -> None:
        self._tops: dict[tuple[str, str], tuple[int, dict[str, float]]] = {}  # by series and column: of which step

    def read(self, step: int, header: SeriesHeader, values: Floats) -> Iterator[HistogramRow]:
        """Yield the histograms of a row; a row of statistics has none, and says where those that follow end."""
        if header.bins is None:
            for series, column in WINDOW_COLUMNS.values():
                if header.series == series and column in header.columns:
                    ends = dict(zip(header.names, values[:, header.columns.index(column)].tolist(), strict=True))
                    noted_at, noted = self._tops.get((series, column), (None, {}))
                    # Several monitors may write rows of one series at a step.
                    self._tops[series, column] = step, {**noted, **ends} if noted_at == step else ends
            return
        for index, column in enumerate(header.columns):
            counts, source = values[:, index], WINDOW_COLUMNS.get((header.series, column))
            if source is None:
                yield HistogramRow(step, header.series, column, header.names, counts, None, len(header.columns) > 1)
                continue
            noted_at, noted = self._tops.get(source, (None, {}))
            ends = noted if noted_at == step else {}
            tops = np.array([ends.get(name, math.nan) for name in header.names])
            known = np.isfinite(tops)
            if known.any():
                names = tuple(name for name, is_known in zip(header.names, known, strict=True) if is_known)
                several = len(header.columns) > 1
                yield HistogramRow(step, header.series, column, names, counts[known], tops[known], several)
