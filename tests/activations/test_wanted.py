"""What a monitor is asked for, and the table it makes of rows."""

import pytest
import torch

from hookline.activations.wanted import DEFAULT, Wanted
from hookline.errors import ConfigError
from hookline.stats.newest import summarize_once
from hookline.stats.wide_rows import measure_with_histograms


def test_columns_come_in_the_order_asked_for() -> None:
    """Statistics as given and once each, then percentiles, then where the histogram's bins end."""
    wanted = Wanted.parse(["std", "histogram", "mean", "std", "time"], [1, 99.5])
    assert wanted.columns == ("std", "mean", "p1", "p99.5", "histogram_top")
    assert (wanted.costs, wanted.dead_units, wanted.reads_tensors) == (("time",), False, True)
    assert not Wanted.parse(["time", "dead_units"], []).reads_tensors


def test_histograms_are_counted_only_when_asked_for() -> None:
    """Plain statistics take the short way."""
    assert Wanted.parse(DEFAULT, []).measure is summarize_once
    assert Wanted.parse([], [50]).measure is measure_with_histograms
    assert Wanted.parse(["histogram"], []).measure is measure_with_histograms


def test_the_table() -> None:
    """Each column holds what its name says, for every row."""
    tensors = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([-4.0, 0.0, 4.0])]
    wanted = Wanted.parse(["max", "mean", "histogram"], [50])
    found = wanted.table(measure_with_histograms(tensors))
    torch.testing.assert_close(found[:, :2], torch.tensor([[3, 2], [4, 0]], dtype=torch.float64))
    assert found[:, 2].tolist() == pytest.approx([2, 0], rel=0.05)
    assert found[:, 3].tolist() == [1, 2]
    assert Wanted.parse(["zeros"], []).table(summarize_once(tensors)).tolist() == [[0], [1]]


@pytest.mark.parametrize("point", [-1, 101, "50", True, float("nan")])
def test_only_percentages(point: object) -> None:
    """What is no number from 0 to 100 is refused by its value."""
    with pytest.raises(ConfigError, match="is no percentage; give numbers from 0 to 100"):
        Wanted.parse([], [point])  # type: ignore[list-item]


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
def test_whether_statistics_are_all(metrics: list[str], points: tuple[float, ...], only: bool) -> None:
    """Compiled code can add them up by itself, and nothing else."""
    assert Wanted.parse(metrics, points).statistics_only is only
