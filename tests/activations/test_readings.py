"""Gathered tensors become tables of the chosen statistics."""

import pytest
import torch

from hookline.activations.readings import Readings
from hookline.activations.wanted import Wanted
from hookline.errors import HooklineError


def test_a_table_for_each_complete_step() -> None:
    """With prefixed columns, the total of non-finite values, and the histograms in a table of their own."""
    readings = Readings(Wanted.parse(["mean", "histogram"], []), "grad_")
    readings.add("a", torch.tensor([1.0, 3.0]), 1)
    readings.add("b", torch.tensor([float("nan"), float("inf"), 0.0]), 1)
    readings.end_step(1)
    table, counts = readings.complete(wait=False)
    assert (table.step, table.names, table.columns) == (1, ["a", "b"], ("grad_mean", "grad_histogram_top"))
    assert table.values[0, 0] == 2 and table.totals == {"grad_non_finite": 2}
    assert counts.columns == ("grad_counts",) and counts.values.sum(-1).tolist() == [[2], [3]]
    assert list(readings.complete(wait=True)) == []


def test_what_is_under_way() -> None:
    """A step that has not ended can be looked at once its tensors are read."""
    readings = Readings(Wanted.parse(["count"], []))
    readings.add("a", torch.zeros(3), 1)
    assert readings.under_way() == []
    assert list(readings.complete(wait=True)) == []
    assert readings.under_way()[0].values.tolist() == [[3]]


def test_the_newest_histogram() -> None:
    """Of the step under way if there is one, of the last call without steps; another name is an error."""
    readings = Readings(Wanted.parse(["histogram"], []))
    with pytest.raises(HooklineError, match="nothing of 'a' has been counted; there are none"):
        readings.histogram("a")
    for size in (1, 2):
        readings.add("a", torch.ones(size), 0)
    list(readings.complete(wait=True))
    assert readings.histogram("a").counts.sum() == 2
    readings.add("a", torch.ones(5), 1)
    list(readings.complete(wait=True))
    assert readings.histogram("a").counts.sum() == 5
    with pytest.raises(HooklineError, match="Valid: a"):
        readings.histogram("b")
