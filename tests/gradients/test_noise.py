"""Test gradient noise: its size over time, its random stream, its state."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hookline import HooklineError
from hookline.gradients.transforms import Noise


def many(rig: Any, **given: Any) -> Any:
    """Make a chain that adds noise to a million zeros."""
    return rig({"w": torch.nn.Parameter(torch.zeros(1_000_000))}, {"name": "noise", "seed": 3, **given})


def test_its_variance_is_annealed_as_in_the_paper(rig: Any) -> None:
    """A million draws have the mean 0 and the variance eta / (1 + t)^gamma for t = 0, 1, 2, …"""
    chain = many(rig, eta=0.3, gamma=0.55)
    for t in range(4):
        drawn = chain.step({"w": torch.zeros(1_000_000)})["w"]
        assert drawn.var().item() == pytest.approx(0.3 / (1 + t) ** 0.55, rel=0.01)
        assert abs(drawn.mean().item()) < 0.005


def test_it_is_added_to_the_gradients(params: Callable[..., Any], apply: Callable[..., Any]) -> None:
    """With eta 0 nothing changes; otherwise every element changes by another number."""
    before, still, noisy = params(), apply("noise", eta=0.0), apply("noise", eta=1.0)
    assert torch.equal(still["matrix"], before["matrix"].grad)
    added = noisy["matrix"] - before["matrix"].grad
    assert added.unique().numel() == 21 and not (added == 0).any()


def test_noise_has_its_own_random_stream(rig: Any) -> None:
    """Training's stream does not advance; noise depends on the seed and the hook's name."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = many(rig).step({"w": torch.zeros(1_000_000)})["w"]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(many(rig).step({"w": torch.zeros(1_000_000)})["w"], first)
    assert not torch.equal(many(rig, **{"as": "other"}).step({"w": torch.zeros(1_000_000)})["w"], first)


def test_without_a_seed_noise_uses_the_runs(rig: Any) -> None:
    """Noise depends on the run's seed."""

    def drawn(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        chain = rig({"w": torch.nn.Parameter(torch.zeros(8))}, "noise")
        torch.randn(seed)  # wherever training's own stream is by now
        return chain.step({"w": torch.zeros(8)})["w"]

    assert torch.equal(drawn(5), drawn(5)) and not torch.equal(drawn(5), drawn(6))


def test_two_updates_differ(rig: Any) -> None:
    """A stream that is reset at each step would repeat the same noise."""
    chain = many(rig, gamma=0.0)
    one, two = (chain.step({"w": torch.zeros(1_000_000)})["w"] for _ in range(2))
    assert not torch.equal(one, two)


@pytest.mark.parametrize("wrong", [-1.0, math.inf, math.nan, True])
def test_invalid_sizes_of_noise_raise(wrong: float) -> None:
    """Invalid limits raise when the hook is made."""
    with pytest.raises(HooklineError, match=r"noise.eta: expected a finite number, at least 0, got"):
        Noise(eta=wrong)


@pytest.mark.parametrize("wrong", [1.5, "7", True])
def test_a_seed_is_a_whole_number(wrong: Any) -> None:
    """The error comes when the hook is made, not at the first step."""
    with pytest.raises(HooklineError, match=r"noise.seed: expected an integer, got"):
        Noise(seed=wrong)
