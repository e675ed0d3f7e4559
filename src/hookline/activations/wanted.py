"""What a monitor is asked for: which numbers, and how they are read from rows of statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, cat

from hookline.errors import ConfigError, nearest
from hookline.stats.collector import Measure
from hookline.stats.columns import STATISTICS
from hookline.stats.histograms import percentiles
from hookline.stats.layout import kept_table
from hookline.stats.newest import summarize_once
from hookline.stats.wide_rows import histograms_of, measure_with_histograms

COSTS = ("time", "memory")
METRICS = (*STATISTICS, *COSTS, "histogram", "dead_units")
DEFAULT = ("mean", "std", "absmax", "zeros", "nans", "infs")
HISTOGRAM_TOP = "histogram_top"


@dataclass(frozen=True)
class Wanted:
    """The metrics of a monitor, sorted by how they are come by."""

    statistics: tuple[str, ...]
    percentiles: tuple[float, ...]
    histogram: bool
    dead_units: bool
    costs: tuple[str, ...]

    @classmethod
    def parse(cls, metrics: Sequence[str], points: Sequence[float]) -> Wanted:
        """Read what the user wrote; a metric that does not exist is an error with the nearest name."""
        if isinstance(metrics, str) or not (metrics or points):
            raise ConfigError("metrics", f"{metrics!r} is no list of metrics; give some of {', '.join(METRICS)}")
        for metric in metrics:
            if metric not in METRICS:
                raise ConfigError("metrics", f"{metric!r} is no metric; {nearest(str(metric), METRICS, 20)}")
        for point in points:
            if not _is_percentage(point):
                raise ConfigError("percentiles", f"{point!r} is no percentage; give numbers from 0 to 100")
        chosen = tuple(dict.fromkeys(metrics))
        return cls(
            statistics=tuple(metric for metric in chosen if metric in STATISTICS),
            percentiles=tuple(points),
            histogram="histogram" in chosen,
            dead_units="dead_units" in chosen,
            costs=tuple(metric for metric in chosen if metric in COSTS),
        )

    @property
    def reads_tensors(self) -> bool:
        """Whether outputs are read for a table of statistics."""
        return bool(self.statistics or self.percentiles or self.histogram)

    @property
    def statistics_only(self) -> bool:
        """Whether the ten statistics are all that is asked for."""
        return bool(self.statistics) and not (self.percentiles or self.histogram or self.dead_units or self.costs)

    @property
    def measure(self) -> Measure:
        """How rows are made: percentiles come from histograms, too."""
        return measure_with_histograms if self.percentiles or self.histogram else summarize_once

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the table of statistics."""
        top = (HISTOGRAM_TOP,) if self.histogram else ()
        return (*self.statistics, *(f"p{point:g}" for point in self.percentiles), *top)

    @cached_property
    def _places(self) -> tuple[int, ...]:
        return tuple([STATISTICS.index(name) for name in self.statistics])

    def table(self, rows: Tensor) -> Tensor:
        """The chosen numbers from rows on the host: [rows, columns]."""
        parts = [rows.index_select(1, kept_table(rows.device, self._places))]
        if self.percentiles:
            parts.append(percentiles(histograms_of(rows), self.percentiles))
        if self.histogram:
            parts.append(rows[:, -1:])
        return cat(parts, dim=1) if len(parts) > 1 else parts[0]


def _is_percentage(point: Any) -> bool:
    return isinstance(point, (int, float)) and not isinstance(point, bool) and 0 <= point <= 100
