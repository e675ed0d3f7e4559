"""Turn statistics per layer into what trackers show: named scalars, and histograms with finite edges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hookline._bins import bin_edges
from hookline.record.layers import LayerRow
from hookline.runs.histograms import HistogramRow


class Histogram(NamedTuple):
    """Counts between edges; there is one edge more than counts."""

    tag: str
    edges: NDArray[np.float64]
    counts: NDArray[np.float64]

    def merged(self, max_bins: int) -> Histogram:
        """Return a histogram with at most `max_bins` bins, each of which is the sum of neighboring ones."""
        starts = np.arange(0, len(self.counts), -(-len(self.counts) // max_bins))
        return Histogram(self.tag, np.append(self.edges[starts], self.edges[-1]), np.add.reduceat(self.counts, starts))


def scalars(row: LayerRow) -> dict[str, float]:
    """Return every number of a row without bins as ``<series>/<layer>/<column>``."""
    header = row.header
    tags = [f"{header.series}/{name}/{column}" for name in header.names for column in header.columns]
    return dict(zip(tags, row.values.flatten().tolist(), strict=True))


def histograms(row: HistogramRow) -> Iterator[Histogram]:
    """Yield the histogram of each layer of which anything finite was counted, from its first filled bin to its last."""
    for index, name in enumerate(row.names):
        counts = row.counts[index].astype(np.float64)
        edges = np.arange(len(counts) + 1.0)  # Bins of unknown meaning get numbers as edges.
        if row.tops is not None:
            low, high = bin_edges(len(counts), float(row.tops[index]))
            edges, counts = np.append(low[1:-2], high[-3]), counts[1:-2]  # infinities and NaN have no edges
            # Trackers need edges that rise, so the bin of zeros ends with the smallest number above 0.
            edges[len(counts) // 2 + 1] = np.nextafter(0.0, 1.0)
        filled = np.flatnonzero(counts > 0)
        if filled.size:
            first, last = filled[0], filled[-1] + 1
            tag = f"{row.series}/{name}" + (f"/{row.column}" if row.has_columns else "")
            yield Histogram(tag, edges[first : last + 1], counts[first:last])
