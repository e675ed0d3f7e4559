"""Costs of calls add up in a step."""

from hookline.activations.costs import Costs


def test_calls_of_a_step_are_added_up() -> None:
    """Each module's time and memory, in the order of the columns; the table is given once."""
    costs = Costs(("memory", "time"))
    costs.add("a", 0.5, 10, 1)
    costs.add("b", 1.0, 1, 1)
    costs.add("a", 0.25, 20, 1)
    assert list(costs.complete(wait=True)) == []
    assert costs.under_way()[0].values.tolist() == [[30, 0.75], [1, 1.0]]
    costs.end_step(1)
    (table,) = costs.complete(wait=False)
    assert (table.step, table.names, table.columns) == (1, ("a", "b"), ("memory", "time"))
    assert list(costs.complete(wait=True)) == [] and costs.under_way() == []


def test_the_next_step_ends_the_one_before() -> None:
    """Where nobody says that a step has ended, another step's call does."""
    costs = Costs(("time",))
    costs.add("a", 1.0, 0, 1)
    costs.add("a", 2.0, 0, 2)
    assert [(table.step, table.values.item()) for table in costs.complete(wait=False)] == [(1, 1.0)]


def test_without_steps_each_call_stands_alone() -> None:
    """Step 0 adds nothing up."""
    costs = Costs(("time",))
    for seconds in (1.0, 2.0):
        costs.add("a", seconds, 0, 0)
    (table,) = costs.complete(wait=False)
    assert (table.step, table.names, table.values.tolist()) == (0, ("a", "a"), [[1.0], [2.0]])
    assert list(costs.complete(wait=True)) == [] and costs.under_way() == []
