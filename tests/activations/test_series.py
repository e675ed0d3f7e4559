"""Series: tables of statistics and costs per step, and their bounded history."""

import math

import pytest
import torch

from hookline import HooklineError
from hookline.activations.metric_spec import MetricSpec
from hookline.activations.series import CallCosts, History, StepTable, TensorStatistics, column_means


def table(
    step: int, columns: tuple[str, ...] = ("mean",), names: tuple[str, ...] = ("a", "b"), start: float = 0
) -> StepTable:
    """A table whose numbers count up from `start`."""
    values = torch.arange(len(names) * len(columns), dtype=torch.float64).reshape(len(names), -1) + start
    return StepTable(step, names, columns, values)


def test_align() -> None:
    """A name that the table does not have gets NaN; histograms keep their bins."""
    found = table(1).align(["b", "c", "a"])
    assert found[[0, 2]].flatten().tolist() == [1, 0] and math.isnan(found[1])
    same = table(1)
    assert same.align(("a", "b")) is same.values
    bins = StepTable(1, ("a",), ("counts",), torch.ones(1, 1, 4))
    assert bins.align(["x", "a"]).shape == (2, 1, 4)


def test_the_latest_values_of_each_kind() -> None:
    """Statistics and costs come in different tables; each module has the newest of both."""
    history = History(10)
    history.add(table(1, ("mean", "std"), start=0))
    history.add(table(1, ("time",), start=50))
    history.add(table(2, ("mean", "std"), names=("a",), start=100))
    assert history.latest() == {"a": {"mean": 100, "std": 101, "time": 50}, "b": {"mean": 2, "std": 3, "time": 51}}
    assert history.latest([table(3, ("time",), names=("a",), start=9)])["a"]["time"] == 9


def test_one_entry_per_step() -> None:
    """Different kinds of one step are joined, also if tables of another step came in between."""
    history = History(10)
    for step in (1, 2):
        history.add(table(step, ("mean",), start=step))
    for step in (1, 2):
        history.add(table(step, ("grad_mean",), start=10 * step))
    assert history.of("a") == [(1, {"mean": 1, "grad_mean": 10}), (2, {"mean": 2, "grad_mean": 20})]
    assert history.of("a", [table(3)])[-1] == (3, {"mean": 0})
    assert history.of("unknown") == []


def test_a_repeated_step_is_a_new_entry() -> None:
    """After a rewind, the same numbers of the same step do not replace the earlier ones."""
    history = History(10)
    history.add(table(1, start=1))
    history.add(table(1, start=5))
    assert history.of("a") == [(1, {"mean": 1}), (1, {"mean": 5})]


def test_without_steps_every_call_is_an_entry() -> None:
    """Entries of step 0 are not joined."""
    history = History(10)
    history.add(StepTable(0, ["a", "a"], ("mean",), torch.tensor([[1.0], [2.0]])))
    history.add(table(0, ("time",), names=("a",), start=7))
    assert history.of("a") == [(0, {"mean": 1}), (0, {"mean": 2}), (0, {"time": 7})]
    assert history.latest() == {"a": {"mean": 2, "time": 7}}


@pytest.mark.parametrize("calls", [1, 3])
def test_old_tables_are_dropped(calls: int) -> None:
    """The limit holds per module, for tables with one or several calls."""
    history = History(10)
    for step in range(100):
        history.add(StepTable(step + 1, ["a"] * calls, ("mean",), torch.full((calls, 1), float(step))))
    assert len(history.of("a")) == 10
    assert len(history._tables) * calls < 10 + calls
    assert history.latest()["a"]["mean"] == 99


def test_means_ignore_nan() -> None:
    """The mean is over the steps that have a value."""
    assert column_means([(1, {"x": 1.0}), (2, {"x": math.nan, "y": 2.0}), (3, {"x": 3.0})]) == {"x": 2.0, "y": 2.0}
    assert column_means([]) == {}


def test_a_kind_of_table_displaces_only_its_own() -> None:
    """Many costs do not displace the statistics."""
    history = History(3)
    history.add(table(0, ("mean",), start=7))
    for step in range(50):
        history.add(table(0, ("time",), names=("a",), start=step))
    assert history.latest()["a"] == {"mean": 7, "time": 49}
    assert [values for _, values in history.of("a")] == [{"time": 47}, {"time": 48}, {"time": 49}]
    assert [values for _, values in history.of("b")] == [{"mean": 8}]


def test_a_table_for_each_complete_step() -> None:
    """With prefixed columns, the total of non-finite values, and the histograms in a separate table."""
    statistics = TensorStatistics(MetricSpec.parse(["mean", "histogram"], []), "grad_")
    statistics.add("a", torch.tensor([1.0, 3.0]), 1)
    statistics.add("b", torch.tensor([float("nan"), float("inf"), 0.0]), 1)
    statistics.end_step(1)
    table, counts = statistics.complete(wait=False)
    assert (table.step, table.names, table.columns) == (1, ["a", "b"], ("grad_mean", "grad_histogram_top"))
    assert table.values[0, 0] == 2 and table.totals == {"grad_non_finite": 2}
    assert counts.columns == ("grad_counts",) and counts.values.sum(-1).tolist() == [[2], [3]]
    assert list(statistics.complete(wait=True)) == []


def test_an_incomplete_step() -> None:
    """The part of a step that was read is available before the step ends."""
    statistics = TensorStatistics(MetricSpec.parse(["count"], []))
    statistics.add("a", torch.zeros(3), 1)
    assert statistics.incomplete() == []
    assert list(statistics.complete(wait=True)) == []
    assert statistics.incomplete()[0].values.tolist() == [[3]]


def test_the_newest_histogram() -> None:
    """Of the current step if there is one, of the last call without steps; an unknown name is an error."""
    statistics = TensorStatistics(MetricSpec.parse(["histogram"], []))
    with pytest.raises(HooklineError, match="no histogram of 'a' yet; there are none"):
        statistics.histogram("a")
    for size in (1, 2):
        statistics.add("a", torch.ones(size), 0)
    list(statistics.complete(wait=True))
    assert statistics.histogram("a").counts.sum() == 2
    statistics.add("a", torch.ones(5), 1)
    list(statistics.complete(wait=True))
    assert statistics.histogram("a").counts.sum() == 5
    with pytest.raises(HooklineError, match="Valid: a"):
        statistics.histogram("b")


def test_calls_of_a_step_are_added_up() -> None:
    """Each module's time and memory, in the order of the columns; the table is returned once."""
    costs = CallCosts(("memory", "time"))
    costs.add("a", 0.5, 10, 1)
    costs.add("b", 1.0, 1, 1)
    costs.add("a", 0.25, 20, 1)
    assert list(costs.complete(wait=True)) == []
    assert costs.incomplete()[0].values.tolist() == [[30, 0.75], [1, 1.0]]
    costs.end_step(1)
    (table,) = costs.complete(wait=False)
    assert (table.step, table.names, table.columns) == (1, ("a", "b"), ("memory", "time"))
    assert list(costs.complete(wait=True)) == [] and costs.incomplete() == []


def test_the_next_step_ends_the_one_before() -> None:
    """A call in another step ends a step that no event has ended."""
    costs = CallCosts(("time",))
    costs.add("a", 1.0, 0, 1)
    costs.add("a", 2.0, 0, 2)
    assert [(table.step, table.values.item()) for table in costs.complete(wait=False)] == [(1, 1.0)]


def test_without_steps_each_call_has_a_row() -> None:
    """Costs of step 0 are not added up."""
    costs = CallCosts(("time",))
    for seconds in (1.0, 2.0):
        costs.add("a", seconds, 0, 0)
    (table,) = costs.complete(wait=False)
    assert (table.step, table.names, table.values.tolist()) == (0, ("a", "a"), [[1.0], [2.0]])
    assert list(costs.complete(wait=True)) == [] and costs.incomplete() == []
