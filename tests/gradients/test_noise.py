"""Gradient noise: its size over time, its own stream, its state."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hookline.errors import HooklineError
from hookline.gradients.transforms import Noise


def many(rig: Any, **given: Any) -> Any:
    """A chain that adds noise to a million zeros."""
    return rig({"w": torch.nn.Parameter(torch.zeros(1_000_000))}, {"name": "noise", "seed": 3, **given})


def test_its_variance_is_annealed_as_in_the_paper(rig: Any) -> None:
    """eta / (1 + t)^gamma for t = 0, 1, 2, …: the measured variance of a million draws, and a mean of zero."""
    chain = many(rig, eta=0.3, gamma=0.55)
    for t in range(4):
        drawn = chain.step({"w": torch.zeros(1_000_000)})["w"]
        assert drawn.var().item() == pytest.approx(0.3 / (1 + t) ** 0.55, rel=0.01)
        assert abs(drawn.mean().item()) < 0.005


def test_it_is_added_to_the_gradients(params: Callable[..., Any], apply: Callable[..., Any]) -> None:
    """With eta 0 nothing changes; otherwise every element does, and differently."""
    before, still, noisy = params(), apply("noise", eta=0.0), apply("noise", eta=1.0)
    assert torch.equal(still["matrix"], before["matrix"].grad)
    added = noisy["matrix"] - before["matrix"].grad
    assert added.unique().numel() == 21 and not (added == 0).any()


def test_it_draws_from_a_stream_of_its_own(rig: Any) -> None:
    """Training's stream stays where it was; the same seed and name give the same noise, another name another."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = many(rig).step({"w": torch.zeros(1_000_000)})["w"]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(many(rig).step({"w": torch.zeros(1_000_000)})["w"], first)
    assert not torch.equal(many(rig, **{"as": "other"}).step({"w": torch.zeros(1_000_000)})["w"], first)


def test_without_a_seed_it_takes_the_runs(rig: Any) -> None:
    """Two runs with the same seed get the same noise, another seed another."""

    def drawn(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        chain = rig({"w": torch.nn.Parameter(torch.zeros(8))}, "noise")
        torch.randn(seed)  # wherever training's own stream is by now
        result: torch.Tensor = chain.step({"w": torch.zeros(8)})["w"]
        return result

    assert torch.equal(drawn(5), drawn(5)) and not torch.equal(drawn(5), drawn(6))


def test_two_updates_differ(rig: Any) -> None:
    """A stream that was rewound at each step would add the same noise for ever."""
    chain = many(rig, gamma=0.0)
    one, two = (chain.step({"w": torch.zeros(1_000_000)})["w"] for _ in range(2))
    assert not torch.equal(one, two)


@pytest.mark.parametrize("wrong", [-1.0, math.inf, math.nan, True])
def test_numbers_that_are_no_noise_are_refused(wrong: float) -> None:
    """When the link is made."""
    with pytest.raises(HooklineError, match=r"noise.eta: expected a finite number, at least 0, got"):
        Noise(eta=wrong)


@pytest.mark.parametrize("wrong", [1.5, "7", True])
def test_a_seed_is_a_whole_number(wrong: Any) -> None:
    """Found when the link is made and not at the first step."""
    with pytest.raises(HooklineError, match=r"noise.seed: expected an integer, got"):
        Noise(seed=wrong)
