"""Mixed loaders: drawn by weight from a stream that nothing else moves, in epochs of a known length if possible."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from read_batches import ONE_WINDOW, Reader, Unknown, make_reader

from hookline.errors import ConfigError

WEIGHTED = {"loader_schedule": "weighted"}


def drawn(epochs: int = 1, **options: Any) -> list[list[int]]:
    """Return the loaders that each epoch of 40 batches draws from."""
    read = Reader(
        [[0] * 9, [1] * 9], limit_train_batches=40, max_epochs=epochs, accumulate=ONE_WINDOW, **WEIGHTED, **options
    )
    return read.by_epoch()


def test_weights_are_frequencies() -> None:
    """Each loader comes as often as its weight says, within what chance allows."""
    weights = {"a": 6, "b": 3, "c": 1}
    trainer = make_reader({name: [0] * 1000 for name in weights}, max_steps=1000, loader_weights=weights, **WEIGHTED)
    trainer.train()
    assert [trainer.loader_batches[name] / 1000 for name in weights] == pytest.approx([0.6, 0.3, 0.1], abs=0.05)


def test_epochs_and_seeds_draw_differently() -> None:
    """And the same ones alike; no weights are equal weights."""
    orders = [epoch for seed in range(4) for epoch in drawn(4, seed=seed)]
    assert len({tuple(order) for order in orders}) == 16
    assert drawn(4, seed=2) == orders[8:12] == drawn(4, seed=2, loader_weights={"0": 1, "1": 1})


def counted_by_hand(lengths: list[int], end: str) -> int:
    """Count the batches of an epoch of loaders in a circle, one by one."""
    given, count = [0] * len(lengths), 0
    while True:
        for place, length in enumerate(lengths):
            if end == "shortest" and given[place] == length:
                return count
            given[place] += 1
            count += 1
            if end == "longest" and all(have >= want for have, want in zip(given, lengths, strict=True)):
                return count


def total_steps(*loaders: Any, **options: Any) -> int | None:
    """Return how many steps an epoch of some loaders has."""
    return make_reader({str(index): loader for index, loader in enumerate(loaders)}, **options).total_steps


@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.sampled_from(["longest", "shortest"]))
@settings(deadline=None)
def test_the_length_of_a_circle(lengths: list[int], end: str) -> None:
    """It is what counting it one by one comes to."""
    loaders = [[0] * length for length in lengths]
    assert total_steps(*loaders, loader_schedule="round_robin", loader_end=end) == counted_by_hand(lengths, end)


def test_lengths_of_other_schedules() -> None:
    """The sum of one after the other; unknown where loaders are drawn or one does not know; one is itself."""
    assert total_steps([1, 2], [3, 4, 5]) == 5
    assert total_steps([1, 2], Unknown([3])) is None
    assert total_steps([1, 2], [3, 4, 5], **WEIGHTED) is None
    assert total_steps([1, 2], **WEIGHTED) == 2
    assert total_steps([1, 2], Unknown([3]), loader_schedule="round_robin") is None


def test_weights_are_those_of_the_loaders() -> None:
    """A misspelt one and a missing one are refused before the run."""
    loaders = {"books": [1], "web": [1]}
    make_reader(loaders, loader_weights={"books": 1, "web": 2}, **WEIGHTED)
    with pytest.raises(ConfigError, match=r"trainer\.loader_weights\.bools: no such loader; did you mean 'books'"):
        make_reader(loaders, loader_weights={"bools": 1}, **WEIGHTED)
    with pytest.raises(ConfigError, match=r"trainer\.loader_weights: no weight for 'web'"):
        make_reader(loaders, loader_weights={"books": 1}, **WEIGHTED)


def test_drawing_moves_no_other_stream() -> None:
    """Python's own stream stays where it was."""
    before = random.getstate()
    drawn()
    assert random.getstate() == before
