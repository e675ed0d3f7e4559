"""Parse the metrics of a monitor, and select them from statistics rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, cat

from hookline import _checks
from hookline._device import cached_table
from hookline.errors import ConfigError, nearest
from hookline.stats.cache import summarize_cached
from hookline.stats.collector import Measure
from hookline.stats.columns import STATISTICS
from hookline.stats.histograms import histograms_in, percentiles, summarize_with_histograms

COSTS = ("time", "memory")
METRICS = (*STATISTICS, *COSTS, "histogram", "dead_units")
DEFAULT_METRICS = ("mean", "std", "absmax", "zeros", "nans", "infs")


@dataclass(frozen=True)
class MetricSpec:
    """The metrics of a monitor, by how they are measured."""

    statistics: tuple[str, ...]
    percentiles: tuple[float, ...]
    histogram: bool
    dead_units: bool
    costs: tuple[str, ...]

    @classmethod
    def parse(cls, metrics: Sequence[str], points: Sequence[float]) -> MetricSpec:
        """Check and sort what the user wrote.

        Args:
            metrics: Names from `METRICS`; duplicates are dropped.
            points: Percentiles, from 0 to 100.

        Returns:
            The specification.

        Raises:
            ConfigError: If a metric does not exist (with the nearest name), or nothing is requested.
        """
        if isinstance(metrics, str) or not (metrics or points):
            raise ConfigError("metrics", f"expected a list with some of {', '.join(METRICS)}, got {metrics!r}")
        for metric in metrics:
            if metric not in METRICS:
                raise ConfigError("metrics", f"unknown metric {metric!r}; {nearest(str(metric), METRICS, 20)}")
        unique = tuple(dict.fromkeys(metrics))
        return cls(
            statistics=tuple(metric for metric in unique if metric in STATISTICS),
            percentiles=tuple(_checks.percentage(point, "percentiles") for point in points),
            histogram="histogram" in unique,
            dead_units="dead_units" in unique,
            costs=tuple(metric for metric in unique if metric in COSTS),
        )

    @property
    def reads_tensors(self) -> bool:
        """Whether statistics rows of the outputs are needed."""
        return bool(self.statistics or self.percentiles or self.histogram)

    @property
    def statistics_only(self) -> bool:
        """Whether only statistics are requested; compiled code can accumulate these by itself."""
        return bool(self.statistics) and not (self.percentiles or self.histogram or self.dead_units or self.costs)

    @property
    def measure(self) -> Measure:
        """The function that makes statistics rows; percentiles are computed from histograms."""
        return summarize_with_histograms if self.percentiles or self.histogram else summarize_cached

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that `select` returns."""
        top = ("histogram_top",) if self.histogram else ()
        return (*self.statistics, *(f"p{point:g}" for point in self.percentiles), *top)

    def select(self, rows: Tensor) -> Tensor:
        """Return the requested numbers from statistics rows on the host: [rows, columns]."""
        indices = tuple(STATISTICS.index(name) for name in self.statistics)
        parts = [rows.index_select(1, cached_table(rows.device, indices))]
        if self.percentiles:
            parts.append(percentiles(histograms_in(rows), self.percentiles))
        if self.histogram:
            parts.append(rows[:, -1:])
        return cat(parts, dim=1) if len(parts) > 1 else parts[0]
