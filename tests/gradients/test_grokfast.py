"""Test Grokfast-EMA against the paper's recurrence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hookline import HooklineError
from hookline.gradients.transforms import Grokfast


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_papers_recurrence_bit_for_bit(params: Callable[..., Any], rig: Any, dtype: torch.dtype) -> None:
    """A loop gives the same: average = alpha average + (1 - alpha) g, starting with g, then g + lamb average."""
    chain = rig(params(dtype), {"name": "grokfast", "alpha": 0.9, "lamb": 1.5})
    averages: dict[str, torch.Tensor] = {}
    for step in range(4):
        given = {n: p.grad for n, p in params(dtype, seed=step).items() if p.grad is not None}
        after = chain.step(given)
        for name, grad in given.items():
            averages.setdefault(name, grad.clone()).mul_(0.9).add_(grad, alpha=1 - 0.9)
            assert torch.equal(after[name], grad.add(averages[name], alpha=1.5)), (step, name)


def test_a_constant_gradient_is_amplified_by_one_plus_lamb(rig: Any) -> None:
    """The average of a constant is that constant."""
    chain = rig({"w": torch.nn.Parameter(torch.zeros(2))}, {"name": "grokfast", "lamb": 2.0})
    for _ in range(3):
        torch.testing.assert_close(chain.step({"w": torch.tensor([1.0, -2.0])})["w"], torch.tensor([3.0, -6.0]))


def test_a_parameter_may_get_its_first_gradient_later(rig: Any) -> None:
    """Its average starts with its first gradient."""
    both = {name: torch.nn.Parameter(torch.zeros(1)) for name in "ab"}
    chain = rig(both, {"name": "grokfast", "lamb": 1.0})
    chain.step({"a": torch.ones(1)})
    after = chain.step({"a": torch.ones(1), "b": torch.full((1,), 4.0)})
    torch.testing.assert_close(after["b"], torch.tensor([8.0]))


@pytest.mark.parametrize("when", [0, 2])
def test_gradients_that_are_not_finite_do_not_enter_the_average(rig: Any, when: int) -> None:
    """A step that a scaler skips would otherwise make every later gradient NaN."""
    chain = rig({"w": torch.nn.Parameter(torch.zeros(2))}, {"name": "grokfast", "alpha": 0.5, "lamb": 1.0})
    given = [torch.ones(2)] * 4
    given.insert(when, torch.tensor([1.0, float("inf")]))
    after = [chain.step({"w": grad})["w"] for grad in given]
    assert all(grad.isfinite().all() for place, grad in enumerate(after) if place != when)
    if when:  # the average was one, and stays so
        torch.testing.assert_close(after[-1], torch.full((2,), 2.0))


@pytest.mark.parametrize("given", [{"alpha": 1.0}, {"alpha": float("nan")}, {"lamb": -1.0}, {"lamb": float("inf")}])
def test_invalid_numbers_raise(given: dict[str, float]) -> None:
    """With alpha = 1 the average would stay the first gradient."""
    with pytest.raises(HooklineError, match=f"grokfast.{next(iter(given))}: expected a finite number"):
        Grokfast(**given)
