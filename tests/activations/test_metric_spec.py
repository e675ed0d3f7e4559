"""Metric specifications: parsing, and selecting columns from statistics rows."""

import pytest
import torch

from hookline.activations.metric_spec import DEFAULT_METRICS, MetricSpec
from hookline.errors import ConfigError
from hookline.stats.cache import summarize_cached
from hookline.stats.histograms import summarize_with_histograms


def test_columns_have_the_requested_order() -> None:
    """Statistics as given and once each, then percentiles, then the top of the histogram."""
    spec = MetricSpec.parse(["std", "histogram", "mean", "std", "time"], [1, 99.5])
    assert spec.columns == ("std", "mean", "p1", "p99.5", "histogram_top")
    assert (spec.costs, spec.dead_units, spec.reads_tensors) == (("time",), False, True)
    assert not MetricSpec.parse(["time", "dead_units"], []).reads_tensors


def test_histograms_are_counted_only_on_request() -> None:
    """Plain statistics need no histograms."""
    assert MetricSpec.parse(DEFAULT_METRICS, []).measure is summarize_cached
    assert MetricSpec.parse([], [50]).measure is summarize_with_histograms
    assert MetricSpec.parse(["histogram"], []).measure is summarize_with_histograms


def test_select() -> None:
    """Each column has the values of its name, for every row."""
    tensors = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([-4.0, 0.0, 4.0])]
    spec = MetricSpec.parse(["max", "mean", "histogram"], [50])
    found = spec.select(summarize_with_histograms(tensors))
    torch.testing.assert_close(found[:, :2], torch.tensor([[3, 2], [4, 0]], dtype=torch.float64))
    assert found[:, 2].tolist() == pytest.approx([2, 0], rel=0.05)
    assert found[:, 3].tolist() == [1, 2]
    assert MetricSpec.parse(["zeros"], []).select(summarize_cached(tensors)).tolist() == [[0], [1]]


@pytest.mark.parametrize("point", [-1, 101, "50", True, float("nan")])
def test_only_percentages(point: object) -> None:
    """Anything but a number from 0 to 100 is rejected."""
    with pytest.raises(ConfigError, match="percentiles: expected a finite number, at least 0 and at most 100"):
        MetricSpec.parse([], [point])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("metrics", "points", "only"),
    [
        (["mean", "nans"], (), True),
        (["mean"], (50,), False),
        (["mean", "histogram"], (), False),
        (["mean", "dead_units"], (), False),
        (["mean", "time"], (), False),
        (["time"], (), False),
    ],
)
def test_statistics_only(metrics: list[str], points: tuple[float, ...], only: bool) -> None:
    """Compiled code can accumulate only these."""
    assert MetricSpec.parse(metrics, points).statistics_only is only
