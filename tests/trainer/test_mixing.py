"""LoaderOrder: a circle or drawn by weight, resumable, and of a length that is known where it can be."""

from collections import Counter
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookline.errors import ConfigError
from hookline.trainer.data.mixing import LoaderOrder, LoaderSchedule, RoundRobin, Weighted


def taken(turns: LoaderOrder, count: int) -> list[int]:
    """The next few turns."""
    return [turns.next() for _ in range(count)]


def test_round_robin() -> None:
    """One after the other, then again from the first."""
    assert taken(RoundRobin(3), 7) == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("make", [lambda: RoundRobin(3), lambda: Weighted([2, 1, 1], 3, 0)])
def test_orders_resume_where_they_were(make: Any) -> None:
    """Also after their state was written as JSON, which knows no tuples."""
    turns, again = make(), make()
    taken(turns, 5)
    state = turns.state()
    again.restore(state if isinstance(state, int) else [state[0], list(state[1]), state[2]])
    assert taken(again, 50) == taken(turns, 50)


def test_weights_are_frequencies() -> None:
    """Each loader comes as often as its weight says, within what chance allows."""
    counts = Counter(taken(Weighted([6, 3, 1], seed=1, epoch=0), 10_000))
    assert [counts[index] / 10_000 for index in range(3)] == pytest.approx([0.6, 0.3, 0.1], abs=0.02)


def test_epochs_and_seeds_draw_differently() -> None:
    """And the same ones alike."""
    orders = {tuple(taken(Weighted([1, 1], seed, epoch), 40)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    assert taken(Weighted([1, 1], 2, 3), 40) == taken(Weighted([1, 1], 2, 3), 40)


def counted_by_hand(lengths: list[int], end: str) -> int:
    """Batches of an epoch of loaders in a circle, counted one by one."""
    given, count = [0] * len(lengths), 0
    while True:
        for place, length in enumerate(lengths):
            if end == "shortest" and given[place] == length:
                return count
            given[place] += 1
            count += 1
            if end == "longest" and all(have >= want for have, want in zip(given, lengths, strict=True)):
                return count


@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.sampled_from(["longest", "shortest"]))
def test_the_length_of_a_circle(lengths: list[int], end: str) -> None:
    """It is what counting it one by one comes to."""
    assert LoaderSchedule("round_robin", end=end).length(lengths) == counted_by_hand(lengths, end)


def test_lengths_of_other_schedules() -> None:
    """The sum of one after the other; unknown where turns are drawn or a loader does not know; one is itself."""
    assert LoaderSchedule().length([2, 3]) == 5
    assert LoaderSchedule("weighted").length([2, 3]) is None
    assert LoaderSchedule("weighted").length([2]) == 2
    assert LoaderSchedule("round_robin").length([2, None]) is None


def test_without_weights_all_are_drawn_alike() -> None:
    """No weights are equal weights."""
    names = ["a", "b"]
    assert taken(LoaderSchedule("weighted").order(names, 0), 99) == taken(
        LoaderSchedule("weighted", {"a": 1, "b": 1}).order(names, 0), 99
    )


def test_weights_are_those_of_the_loaders() -> None:
    """A misspelt one and a missing one are refused before the run."""
    LoaderSchedule("weighted", {"a": 1, "b": 2}).check({"a": [], "b": []})
    LoaderSchedule("weighted").check({"a": []})
    with pytest.raises(ConfigError, match=r"trainer\.loader_weights\.bools: no such loader; did you mean 'books'"):
        LoaderSchedule("weighted", {"bools": 1}).check(["books", "web"])
    with pytest.raises(ConfigError, match=r"trainer\.loader_weights: no weight for 'web'"):
        LoaderSchedule("weighted", {"books": 1}).check(["books", "web"])


def test_an_epoch_ends_with_the_first_or_the_last() -> None:
    """With the shortest, at the turn of a loader that has ended; with the longest, when all have."""
    assert [LoaderSchedule(end="shortest").is_over([True, False], turn) for turn in (0, 1)] == [True, False]
    assert [LoaderSchedule(end="longest").is_over(ended, 0) for ended in ([True, False], [True, True])] == [False, True]


def test_drawing_moves_no_other_stream() -> None:
    """Python's own stream stays where it was."""
    import random

    before = random.getstate()
    list(islice(iter(Weighted([1, 2], 0, 0).next, None), 20))
    assert random.getstate() == before
