"""Make the numbers of a report fit its size: neighbouring ranges of steps become one, until they do.

A spike survives: curves keep the lowest and the highest value of a range, layers the value farthest from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookline.runs.curves import Curve
from hookline.runs.summary import HistogramTable, LayerTable, RunSummary, merge_pairs

Array = NDArray[Any]
_CURVE_FIELDS = 200  # bytes, about: the name of a curve, its last and best values and where its arrays are


@dataclass(frozen=True)
class CurveArrays:
    """The arrays of a curve, one entry per range of steps."""

    steps: Array
    mean: Array
    lowest: Array
    highest: Array

    @classmethod
    def of(cls, curve: Curve) -> CurveArrays:
        """Return the arrays of a curve in the precision of the page; a curve of single steps has one for all three."""
        with np.errstate(over="ignore"):  # beyond float32 is infinite, and drawn as a gap
            mean = curve.mean.astype(np.float32)
            extremes = (curve.lowest, curve.highest) if curve.width > 1 else (mean, mean)
            lowest, highest = (array.astype(np.float32, copy=False) for array in extremes)
        return cls(curve.steps, mean, lowest, highest)

    @property
    def nbytes(self) -> int:
        """The size of the values; the steps are shared by most curves."""
        return self.mean.nbytes * (1 if self.lowest is self.mean else 3)

    def halved(self) -> CurveArrays:
        """Return the arrays with each two ranges merged."""
        mean = merge_pairs(self.mean, lambda a, b: np.where(np.isnan(a), b, np.where(np.isnan(b), a, (a + b) / 2)))
        lowest, highest = merge_pairs(self.lowest, np.fmin), merge_pairs(self.highest, np.fmax)
        return CurveArrays(self.steps[::2], mean, lowest, highest)


@dataclass
class PageNumbers:
    """The numbers of a run."""

    curves: dict[str, CurveArrays]
    layers: dict[str, LayerTable]
    histograms: dict[str, HistogramTable]
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """By kind, the names for which there was no room."""

    @classmethod
    def of(cls, summary: RunSummary) -> PageNumbers:
        """Return the numbers of a summary."""
        curves = {name: CurveArrays.of(curve) for name, curve in summary.curves.items()}
        return cls(curves, summary.layers, summary.histograms)


def fit(runs: Sequence[PageNumbers], budget: int) -> None:
    """Merge ranges until all numbers take at most this many bytes; always those of the kind that takes most.

    If one range for all steps takes too much, the last names of the largest kind are left out.
    """
    sizes = {kind: _size(runs, kind) for kind in ("curves", "layers", "histograms")}
    while sum(sizes.values()) > budget:
        mergeable = [kind for kind in sizes if any(len(table.steps) > 1 for table in _tables(runs, kind))]
        kind = max(mergeable or sizes, key=sizes.__getitem__)
        for run in runs:
            tables = getattr(run, kind)
            if mergeable:
                tables.update({name: table.halved() for name, table in tables.items() if len(table.steps) > 1})
                continue
            for name in list(tables)[len(tables) // 2 :]:
                del tables[name]
                run.left_out.setdefault(kind, []).append(name)
        sizes[kind] = _size(runs, kind)


def _tables(runs: Sequence[PageNumbers], kind: str) -> list[CurveArrays | LayerTable | HistogramTable]:
    return [table for run in runs for table in getattr(run, kind).values()]


def _size(runs: Sequence[PageNumbers], kind: str) -> int:
    return sum(map(_size_in_page, _tables(runs, kind)))


def _size_in_page(table: CurveArrays | LayerTable | HistogramTable) -> int:
    """Return how many bytes the numbers of a table take, and what its names take beside them."""
    if isinstance(table, CurveArrays):
        return table.nbytes + _CURVE_FIELDS
    # With quotes and a comma; numbers are written as base64, names are not.
    names = sum(len(name) + 3 for name in table.names) * 3 // 4
    if isinstance(table, LayerTable):
        return table.values.size * 4 + names
    return table.counts.size + table.tops.size * 2 + names  # a count takes a byte, the end of a window two
