"""Tables of the last steps: kept within bounds, read by name."""

import math

import pytest
import torch

from hookline.activations.tables import StepTable, Tables, means


def table(
    step: int, columns: tuple[str, ...] = ("mean",), names: tuple[str, ...] = ("a", "b"), start: float = 0
) -> StepTable:
    """A table whose numbers count up from `start`."""
    values = torch.arange(len(names) * len(columns), dtype=torch.float64).reshape(len(names), -1) + start
    return StepTable(step, names, columns, values)


def test_rows_for_other_names() -> None:
    """A table over more names has NaN where it has nothing; histograms keep their bins."""
    found = table(1).over(["b", "c", "a"])
    assert found[[0, 2]].flatten().tolist() == [1, 0] and math.isnan(found[1])
    same = table(1)
    assert same.over(("a", "b")) is same.values
    bins = StepTable(1, ("a",), ("counts",), torch.ones(1, 1, 4))
    assert bins.over(["x", "a"]).shape == (2, 1, 4)


def test_the_latest_of_each_kind_of_number() -> None:
    """Statistics and costs come in tables of their own; the newest of each counts, per module."""
    tables = Tables(10)
    tables.add(table(1, ("mean", "std"), start=0))
    tables.add(table(1, ("time",), start=50))
    tables.add(table(2, ("mean", "std"), names=("a",), start=100))
    assert tables.latest() == {"a": {"mean": 100, "std": 101, "time": 50}, "b": {"mean": 2, "std": 3, "time": 51}}
    assert tables.latest([table(3, ("time",), names=("a",), start=9)])["a"]["time"] == 9


def test_one_entry_a_step() -> None:
    """What was measured apart in one step stands together, also when another step's came in between."""
    tables = Tables(10)
    for step in (1, 2):
        tables.add(table(step, ("mean",), start=step))
    for step in (1, 2):
        tables.add(table(step, ("grad_mean",), start=10 * step))
    assert tables.history("a") == [(1, {"mean": 1, "grad_mean": 10}), (2, {"mean": 2, "grad_mean": 20})]
    assert tables.history("a", [table(3)])[-1] == (3, {"mean": 0})
    assert tables.history("nobody") == []


def test_a_step_made_again_is_another_entry() -> None:
    """After a rewind, the same numbers of the same step do not replace the earlier ones."""
    tables = Tables(10)
    tables.add(table(1, start=1))
    tables.add(table(1, start=5))
    assert tables.history("a") == [(1, {"mean": 1}), (1, {"mean": 5})]


def test_without_steps_every_call_is_an_entry() -> None:
    """Step 0 joins nothing."""
    tables = Tables(10)
    tables.add(StepTable(0, ["a", "a"], ("mean",), torch.tensor([[1.0], [2.0]])))
    tables.add(table(0, ("time",), names=("a",), start=7))
    assert tables.history("a") == [(0, {"mean": 1}), (0, {"mean": 2}), (0, {"time": 7})]
    assert tables.latest() == {"a": {"mean": 2, "time": 7}}


@pytest.mark.parametrize("calls", [1, 3])
def test_old_tables_make_way(calls: int) -> None:
    """So many values of a module are kept and not many more, however many calls a table holds."""
    tables = Tables(10)
    for step in range(100):
        tables.add(StepTable(step + 1, ["a"] * calls, ("mean",), torch.full((calls, 1), float(step))))
    assert len(tables.history("a")) == 10
    assert sum(tables._rows.values()) < 10 + calls
    assert tables.latest()["a"]["mean"] == 99


def test_means_leave_nan_out() -> None:
    """The mean of what there is; a step without a value does not spoil it."""
    assert means([(1, {"x": 1.0}), (2, {"x": math.nan, "y": 2.0}), (3, {"x": 3.0})]) == {"x": 2.0, "y": 2.0}
    assert means([]) == {}


def test_what_is_measured_apart_makes_way_for_its_own_kind_only() -> None:
    """A flood of costs does not push the statistics out."""
    tables = Tables(3)
    tables.add(table(0, ("mean",), start=7))
    for step in range(50):
        tables.add(table(0, ("time",), names=("a",), start=step))
    assert tables.latest()["a"] == {"mean": 7, "time": 49}
    assert [values for _, values in tables.history("a")] == [{"time": 47}, {"time": 48}, {"time": 49}]
    assert [values for _, values in tables.history("b")] == [{"mean": 8}]
