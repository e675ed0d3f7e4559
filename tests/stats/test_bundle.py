"""Rows of several steps cross together, and come apart as they were."""

import pytest
import torch

from hookline.stats.bundle import TOGETHER, Bundle


def rows(value: float, many: int = 2) -> torch.Tensor:
    """Rows that are told apart by their values."""
    return torch.full((many, 3), value)


def sent_at(steps: range) -> list[int]:
    """At which of these steps a bundle says that it is time."""
    bundle, times = Bundle(), []
    for step in steps:
        if bundle.add(step, ["a", "b"], rows(step)):
            times.append(step)
            bundle.tie_up()
    return times


def test_parts_come_apart_as_they_were() -> None:
    """Steps, keys and rows, in their order; afterwards the bundle is empty."""
    bundle = Bundle()
    bundle.add(3, ["a", "b"], rows(3))
    bundle.add(4, ["c"], rows(4, many=1))
    tied, whole = bundle.tie_up()
    assert len(bundle) == 0 and whole.shape == (3, 3)
    first, second = tied.apart(whole)
    assert first[:2] == (3, ["a", "b"]) and second[:2] == (4, ["c"])
    assert torch.equal(first[2], rows(3)) and torch.equal(second[2], rows(4, many=1))


@pytest.mark.parametrize(
    ("steps", "times"),
    [
        (range(1, 2 * TOGETHER + 1), [TOGETHER, 2 * TOGETHER]),
        (range(3 * TOGETHER, 9 * TOGETHER, TOGETHER), list(range(3 * TOGETHER, 9 * TOGETHER, TOGETHER))),
        (range(3, 25, 3), [9, 18]),
    ],
    ids=["every step", "rarely", "now and then"],
)
def test_no_row_waits_for_more_than_a_few_steps(steps: range, times: list[int]) -> None:
    """Rows of every step go eight at a time; those of a schedule as rare as that go at once."""
    assert sent_at(steps) == times


def test_without_steps_so_many_lots_go_together() -> None:
    """A model that runs without a trainer has step 0 all the time."""
    bundle = Bundle()
    assert [bundle.add(0, ["a"], rows(1, many=1)) for _ in range(TOGETHER)] == [False] * (TOGETHER - 1) + [True]


def test_a_run_that_goes_back_does_not_fill_it_without_end() -> None:
    """Later steps are never far from a first one that is ahead of them."""
    bundle = Bundle()
    bundle.add(1000, ["a"], rows(1, many=1))
    assert any(bundle.add(step, ["a"], rows(1, many=1)) for step in range(1, TOGETHER))


def test_which_steps_wait() -> None:
    """So that a step does not end while rows of it are here."""
    bundle = Bundle()
    bundle.add(1, ["a"], rows(1, many=1))
    assert bundle.has_of(1) and not bundle.has_of(2)
