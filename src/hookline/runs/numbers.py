"""`Numbers`: every number of a run that does not depend on the clock, to compare runs bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookline.record.format import NOT_METRICS, Floats, SeriesHeader
from hookline.runs.curves import Steps, Values, as_arrays, sort_by_step

_BY_THE_CLOCK = ("throughput/", "ranks/")  # metrics that differ between any two runs
_CLOCK_COLUMNS = frozenset({"time", "memory"})  # series of layers with one of these do, too


class Numbers:
    """Takes the rows of a run in the order of its files; later lines of a step win."""

    def __init__(self) -> None:
        self.layers: dict[int, dict[SeriesHeader, NDArray[Any]]] = {}
        """By step: [names, columns], with a hash in place of each histogram, so that they take little memory."""
        self._parts: dict[str, list[tuple[Steps, Values]]] = {}

    def add_metrics(self, columns: dict[str, tuple[list[int], list[Any]]]) -> None:
        """Add rows of metrics.jsonl as columns."""
        for name, (steps, values) in columns.items():
            if name not in NOT_METRICS and not name.startswith(_BY_THE_CLOCK):
                self._parts.setdefault(name, []).append(as_arrays(steps, values))

    def add_layers(self, step: int, header: SeriesHeader, values: Floats) -> None:
        """Add a step of layers.jsonl."""
        if _CLOCK_COLUMNS.isdisjoint(header.columns):
            written = self.layers.setdefault(step, {})
            written.pop(header, None)  # what comes later overwrites, also where headers overlap
            written[header] = values if header.bins is None else _hashes(values)

    @property
    def metrics(self) -> dict[str, tuple[Steps, Values]]:
        """By metric: the steps in order, and the values."""
        return {
            name: sort_by_step(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
            for name, parts in self._parts.items()
        }

    @property
    def steps(self) -> Steps:
        """Every step with a number."""
        return np.unique(
            np.concatenate([np.array([*self.layers], np.int64), *(own for own, _ in self.metrics.values())])
        )


def _hashes(histograms: NDArray[Any]) -> NDArray[Any]:
    """Return a hash of each histogram, [names, columns]."""
    hashes = [hash(counts.tobytes()) for counts in histograms.reshape(-1, histograms.shape[2])]
    return np.array(hashes, np.int64).reshape(histograms.shape[:2])
