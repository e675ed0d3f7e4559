"""What the processes of a run do together, on real processes and on one."""

from typing import Any

import pytest
import torch
from rank_processes import run_on_ranks

from hookline.errors import RankError
from hookline.ranks import Ranks, compare, find_ranks


def do_everything(rank: int) -> dict[str, Any]:
    ranks = find_ranks()
    assert find_ranks() is ranks  # one group per process, however many trainers there are
    found = {"who": [ranks.rank, ranks.world_size, ranks.local_rank], "first": ranks.first(lambda: f"by {rank}")}
    found["gathered"] = ranks.gather({"rank": rank, "text": "é" * rank})
    found["decided"] = [ranks.decide(rank == 1), ranks.decide(False)]
    sent = [ranks.send([rank, 1]), ranks.send([10, 10])]
    found["agreed"] = [receive() for receive in sent]
    maxima, sums = ranks.exchange(
        torch.tensor([float(rank), -1.0], dtype=torch.float64), lambda highest: highest * (rank + 1)
    )
    found["exchanged"] = [maxima.tolist(), sums.tolist()]
    added = ranks.add_up({"all": [1.0, 2.0], **({"mine": [7.0, 1.0, 2.0]} if rank == 1 else {})})
    found["added"] = {name: numbers.tolist() for name, numbers in added.items()}
    return found


def test_ranks_decide_agree_and_add_up_together() -> None:
    for rank, result in enumerate(run_on_ranks(do_everything, 2)):
        assert result.value == {
            "who": [rank, 2, rank],
            "first": "by 0",
            "gathered": [{"rank": 0, "text": ""}, {"rank": 1, "text": "é"}],
            "decided": [True, False],
            "agreed": [[1, 2], [20, 20]],
            "exchanged": [[1.0, -1.0], [3.0, -3.0]],
            "added": {"all": [2.0, 4.0], "mine": [7.0, 1.0, 2.0]},
        }


def fail_first(rank: int) -> str:
    def make() -> None:
        raise ValueError("no disk")

    try:
        find_ranks().first(make)
    except (ValueError, RankError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_failure_of_rank_0_reaches_every_rank() -> None:
    assert [one.value for one in run_on_ranks(fail_first, 2)] == [
        "ValueError: no disk",
        "RankError: rank 0: ValueError: no disk",
    ]


def compare_configs(rank: int) -> str:
    ranks = find_ranks()
    compare(ranks, {"options": {"max_steps": 5}})
    try:
        compare(ranks, {"options": {"trainer": {"max_steps": 5 + rank}}, "torch": "2"})
    except RankError as error:
        return str(error)
    return "nothing"


def test_a_difference_is_named_by_path_and_rank() -> None:
    expected = "the ranks differ in options: trainer.max_steps is 5 on rank 0, 6 on rank 1"
    assert [one.value for one in run_on_ranks(compare_configs, 2)] == [expected, expected]


def test_one_process_needs_no_process_group() -> None:
    ranks = find_ranks()
    assert type(ranks) is Ranks
    assert ranks.first(lambda: 3) == 3
    assert ranks.gather("x") == ["x"]
    assert ranks.send([1, 2])() == ranks.total([1, 2]) == [1, 2]
    assert ranks.decide(True) and not ranks.decide(False)
    assert ranks.add_up({"loss": [2.0, 1.0]})["loss"].tolist() == [2.0, 1.0] and ranks.add_up({}) == {}
    with pytest.raises(ValueError, match="no disk"):
        ranks.first(lambda: (_ for _ in ()).throw(ValueError("no disk")))
