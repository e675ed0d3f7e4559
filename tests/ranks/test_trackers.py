"""A tracker runs on rank 0 alone, and needs its package there alone."""

import sys

from rank_processes import run_on_ranks
from rank_runs import make_trainer

from hookline import Tracker


def train(rank: int, without: int) -> int:
    """Train with a tracker whose package one rank does not have, and return the step."""

    class Small(Tracker):
        package = "colorsys"

    if rank == without:
        sys.modules["colorsys"] = None  # type: ignore[assignment]
    trainer = make_trainer("ddp", rank, 2, None, hooks=[Small()])
    trainer.train()
    return trainer.step


def test_a_tracker_needs_its_package_on_rank_0_alone() -> None:
    assert [result.value for result in run_on_ranks(train, 2, 1)] == [8, 8]
    for result in run_on_ranks(train, 2, 0, check=False):
        assert "it needs the package colorsys" in result.error
