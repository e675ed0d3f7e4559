"""Turn statistics per layer into what trackers show: named scalars, and histograms with finite edges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hookline.record.layers import LayerRow
from hookline.record.packing import WINDOW_COLUMNS


class Histogram(NamedTuple):
    """Counts between edges; there is one edge more than counts."""

    tag: str
    edges: NDArray[np.float64]
    counts: NDArray[np.float64]

    def merged(self, most: int) -> Histogram:
        """Return a histogram with at most so many bins: each is the sum of as many neighbours as that needs."""
        starts = np.arange(0, len(self.counts), -(-len(self.counts) // most))
        return Histogram(self.tag, np.append(self.edges[starts], self.edges[-1]), np.add.reduceat(self.counts, starts))


def scalars(row: LayerRow) -> dict[str, float]:
    """Return every number of a row without bins as ``<series>/<layer>/<column>``."""
    header = row.header
    tags = [f"{header.series}/{name}/{column}" for name in header.names for column in header.columns]
    return dict(zip(tags, row.values.flatten().tolist(), strict=True))


class HistogramReader:
    """Reads histograms from rows with bins; the rows must come in the order of the record.

    The bins of a monitor end at the octave that its statistics row of the same step names. They are what
    `hookline.stats.histograms` describes; infinities and NaN, which have no edges, are left out. Other series, whose
    bins are unknown, get the edges 0, 1, 2, ….
    """

    def __init__(self) -> None:
        self._tops: dict[tuple[str, str], tuple[int, dict[str, float]]] = {}  # by series and column: step, octaves

    def note_tops(self, row: LayerRow) -> None:
        """Store where bins end, if a statistics row says so."""
        header = row.header
        for index, column in enumerate(header.columns):
            if (header.series, column) in WINDOW_COLUMNS.values():
                step, known = self._tops.get((header.series, column), (None, {}))
                tops = dict(zip(header.names, row.values[:, index].tolist(), strict=True))
                # Several monitors may write rows of one series at a step.
                self._tops[header.series, column] = row.step, {**known, **tops} if step == row.step else tops

    def read(self, row: LayerRow) -> Iterator[Histogram]:
        """Yield the histogram of each layer of which anything was counted."""
        header = row.header
        for index, column in enumerate(header.columns):
            statistic = WINDOW_COLUMNS.get((header.series, column))
            step, tops = (None, {}) if statistic is None else self._tops.get(statistic, (None, {}))
            for name, counts in zip(header.names, row.values[:, index].double().numpy(), strict=True):
                if statistic is None:
                    edges = np.arange(len(counts) + 1, dtype=np.float64)
                elif step == row.step and np.isfinite(top := tops.get(name, np.nan)):
                    counts = counts[1:-2]  # without -inf, +inf and NaN
                    edges = logarithmic_edges(top, len(counts))
                else:
                    continue
                tag = f"{header.series}/{name}" + (f"/{column}" if len(header.columns) > 1 else "")
                filled = np.flatnonzero(counts > 0)
                if filled.size:
                    first, last = filled[0], filled[-1] + 1
                    yield Histogram(tag, edges[first : last + 1], counts[first:last])


def logarithmic_edges(top: float, bins: int) -> NDArray[np.float64]:
    """Return the edges of a monitor's finite bins: negative magnitudes, one bin around zero, positive magnitudes.

    Args:
        top: The octave in which they end.
        bins: How many there are: 254 of each sign at eight per octave, fewer if they were folded.
    """
    per_sign = bins // 2
    per_octave = min((1, 2, 4, 8), key=lambda rate: abs(-(-254 * rate // 8) - per_sign))
    magnitudes = np.exp2(top + 1 - np.arange(per_sign + 1) / per_octave)
    return np.concatenate([-magnitudes, magnitudes[::-1]])
