"""Read histograms from the rows of layers.jsonl, each with the octave at its window's end; needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from hookline._bins import Doubles
from hookline.record.format import WINDOW_COLUMNS, Floats, SeriesHeader


class HistogramRow(NamedTuple):
    """The histograms of one step in one column of a series."""

    series: str
    column: str
    names: tuple[str, ...]
    counts: Floats
    """[names, bins], as `hookline._bins` describes."""
    tops: Doubles | None
    """The octave in which each window ends; None for series whose bins are unknown, because no monitor wrote them."""

    has_columns: bool
    """Whether the series has several columns, like that of a monitor of outputs and their gradients."""


class HistogramReader:
    """Takes the rows of layers.jsonl in their order, and returns the histograms in them.

    Where the bins of a monitor end is in its statistics row of the same step. A histogram without it, which a kill may
    leave behind, is left out.
    """

    def __init__(self) -> None:
        self._tops: dict[tuple[str, str, str], tuple[int, float]] = {}  # by series, column and name: step and octave

    def read(self, step: int, header: SeriesHeader, values: Floats) -> Iterator[HistogramRow]:
        """Yield the histograms of a row; a row of statistics has none, and says where those that follow end."""
        if header.bins is None:
            for series, column in WINDOW_COLUMNS.values():
                if header.series == series and column in header.columns:
                    tops = values[:, header.columns.index(column)].tolist()
                    for name, top in zip(header.names, tops, strict=True):
                        self._tops[series, column, name] = step, top
            return
        several = len(header.columns) > 1
        for index, column in enumerate(header.columns):
            counts, source = values[:, index], WINDOW_COLUMNS.get((header.series, column))
            if source is None:
                yield HistogramRow(header.series, column, header.names, counts, None, several)
                continue
            noted = [self._tops.get((*source, name), (step, math.nan)) for name in header.names]
            ends = np.array([top if noted_at == step else math.nan for noted_at, top in noted])
            known = np.isfinite(ends)
            if known.any():
                names = tuple(name for name, is_known in zip(header.names, known, strict=True) if is_known)
                yield HistogramRow(header.series, column, names, counts[known], ends[known], several)
