"""A sample is random in what it takes, and nothing else is."""

import random
from typing import Any

import pytest
import torch

from hookline import Sample
from hookline.errors import ConfigError


@pytest.mark.req("002-82")
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
def test_it_takes_its_share(rate: float) -> None:
    """About that share of many numbers, none and all included."""
    taken = sum(Sample(rate).takes(step) for step in range(20_000))
    assert abs(taken - rate * 20_000) <= (0 if rate in (0.0, 1.0) else 250)


def test_it_is_the_same_in_every_run_and_touches_no_stream() -> None:
    """The choice follows from seed and number alone: any order, any process, any state of the random streams."""
    before = torch.get_rng_state(), random.getstate()
    first = [Sample(0.3, seed="mine").takes(step) for step in range(200)]
    torch.rand(3)
    random.random()
    again = Sample(0.3, seed="mine")
    assert [again.takes(step) for step in reversed(range(200))] == first[::-1]
    assert first[:12] == [False, False, False, True, False, False, False, True, False, False, False, False]
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    Sample(0.5).takes(1)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_seeds_choose_independently() -> None:
    """Two hooks that sample half of the steps share about a quarter; 1 and '1' are two seeds."""
    one, two = Sample(0.5, seed=1), Sample(0.5, seed="1")
    both = sum(one.takes(step) and two.takes(step) for step in range(10_000))
    assert 2300 < both < 2700


@pytest.mark.parametrize("rate", [-0.1, 1.5, float("nan"), "half", True])
def test_what_is_no_share_is_rejected(rate: Any) -> None:
    """A rate lies between 0 and 1."""
    with pytest.raises(ConfigError, match=r"rate: expected a finite number,? at least 0 and at most 1"):
        Sample(rate)
