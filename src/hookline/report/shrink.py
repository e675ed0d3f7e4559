"""Make the numbers of a report fit its size: neighbouring ranges of steps become one, until they do.

A spike survives: curves keep the lowest and the highest value of a range, layers the value farthest from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookline.runs.curves import Curve
from hookline.runs.summary import HistogramTable, LayerTable, RunSummary, farther_from_zero

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
            lowest, highest = (one.astype(np.float32, copy=False) for one in extremes)
        return cls(curve.steps, mean, lowest, highest)

    @property
    def nbytes(self) -> int:
        """The size of the values; the steps are shared by most curves."""
        return self.mean.nbytes * (1 if self.lowest is self.mean else 3)


@dataclass
class Numbers:
    """The numbers of a run."""

    curves: dict[str, CurveArrays]
    layers: dict[str, LayerTable]
    histograms: dict[str, HistogramTable]
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """By kind, the names for which there was no room."""

    @classmethod
    def of(cls, summary: RunSummary) -> Numbers:
        """Return the numbers of a summary."""
        curves = {name: CurveArrays.of(curve) for name, curve in summary.curves.items()}
        return cls(curves, summary.layers, summary.histograms)


def fit(runs: Sequence[Numbers], budget: int) -> None:
    """Merge ranges until all numbers take at most this many bytes; always those of the kind that takes most.

    If one range for all steps takes too much, the last names of the largest kind are left out.
    """
    kinds: dict[str, tuple[Callable[[Any], int], Callable[[Any], Any]]] = {
        "curves": (lambda one: one.nbytes + _CURVE_FIELDS, _halve_curve),
        "layers": (lambda one: one.values.size * 4 + _size_of_names(one), _halve_layers),
        # A count takes a byte, the end of the window of a name two.
        "histograms": (lambda one: one.counts.size + one.tops.size * 2 + _size_of_names(one), _halve_histograms),
    }
    sizes = {kind: _size(runs, kind, size_of) for kind, (size_of, _) in kinds.items()}
    while sum(sizes.values()) > budget:
        mergeable = [kind for kind in kinds if any(len(one.steps) > 1 for one in _tables(runs, kind))]
        kind = max(mergeable or kinds, key=sizes.__getitem__)
        size_of, halve = kinds[kind]
        for run in runs:
            tables = getattr(run, kind)
            if mergeable:
                tables.update({name: halve(one) for name, one in tables.items() if len(one.steps) > 1})
                continue
            for name in list(tables)[len(tables) // 2 :]:
                del tables[name]
                run.left_out.setdefault(kind, []).append(name)
        sizes[kind] = _size(runs, kind, size_of)


def _tables(runs: Sequence[Numbers], kind: str) -> list[Any]:
    return [one for run in runs for one in getattr(run, kind).values()]


def _size(runs: Sequence[Numbers], kind: str, size_of: Callable[[Any], int]) -> int:
    return sum(map(size_of, _tables(runs, kind)))


def _size_of_names(table: LayerTable | HistogramTable) -> int:
    """Return the size of the names, with quotes and a comma; numbers are written as base64, names are not."""
    return sum(len(name) + 3 for name in table.names) * 3 // 4


def _halve_curve(curve: CurveArrays) -> CurveArrays:
    mean = _merge_pairs(curve.mean, lambda a, b: np.where(np.isnan(a), b, np.where(np.isnan(b), a, (a + b) / 2)))
    lowest, highest = _merge_pairs(curve.lowest, np.fmin), _merge_pairs(curve.highest, np.fmax)
    return CurveArrays(curve.steps[::2], mean, lowest, highest)


def _halve_layers(layers: LayerTable) -> LayerTable:
    return replace(layers, steps=layers.steps[::2], values=_merge_pairs(layers.values, farther_from_zero))


def _halve_histograms(histograms: HistogramTable) -> HistogramTable:
    return replace(histograms, steps=histograms.steps[::2], counts=_merge_pairs(histograms.counts, np.add))


def _merge_pairs(values: Array, merge: Callable[[Array, Array], Array]) -> Array:
    """Merge each two entries along the first axis; the last one of an odd number stays alone."""
    even = len(values) - len(values) % 2
    merged = merge(values[0:even:2], values[1:even:2])
    return np.concatenate([merged, values[even:]]).astype(values.dtype, copy=False)
