"""Freezing and masking: what the optimizer then does is what counts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hookline.errors import GradientError, HooklineError, RegistrationError
from hookline.gradients.transforms import Freeze, Mask


def test_freeze_removes_the_gradients(params: Callable[..., Any], apply: Callable[..., Any]) -> None:
    """Those selected are None, the others the very same."""
    after, before = apply("freeze", params=["matrix", "vec*"]), params()
    assert after["matrix"] is None and after["vector"] is None
    assert torch.equal(after["kernel"], before["kernel"].grad)


def test_a_frozen_parameter_does_not_move_under_adamw_and_a_zeroed_one_does(rig: Any) -> None:
    """Momentum and weight decay move on a gradient of zeros; None stops both."""
    moved = {}
    for link in ("freeze", "mask"):
        param = torch.nn.Parameter(torch.ones(3))
        chain = rig({"w": param}, {"name": link, "params": "w", "start": 2})
        optimizer = torch.optim.AdamW([param], lr=0.1)
        param.grad = torch.ones(3)
        optimizer.step()
        before = param.detach().clone()
        chain.registry.tables.decide_who_is_due(Clock(2), [(link, chain.registry.entry(link).schedule)], False)
        chain.step({"w": torch.ones(3)})
        optimizer.step()
        moved[link] = not torch.equal(param.detach(), before)
    assert moved == {"freeze": False, "mask": True}


class Clock:
    """A run at some step."""

    def __init__(self, step: int) -> None:
        self.steps = self.batches = step
        self.epochs, self.tokens, self.seconds = 1, 0, 0.0


def test_mask_zeroes_whole_gradients(params: Callable[..., Any], apply: Callable[..., Any]) -> None:
    """Zeros instead of None."""
    after, before = apply("mask", params="matrix"), params()
    assert torch.equal(after["matrix"], torch.zeros(7, 3)) and torch.equal(after["vector"], before["vector"].grad)


def test_mask_keeps_what_its_tensor_keeps(params: Callable[..., Any], apply: Callable[..., Any]) -> None:
    """A row mask broadcasts; also a NaN that is masked out is gone; parameters without a mask stay."""
    keep = torch.tensor([[True, False, True]])
    after, before = apply("mask", masks={"mat*": keep, "vector": torch.tensor([1, 0, 0, 0, 1])}), params()
    assert torch.equal(after["matrix"], torch.where(keep, before["matrix"].grad, 0.0))
    assert after["vector"].nonzero().flatten().tolist() == [0, 4]
    assert torch.equal(after["kernel"], before["kernel"].grad)


def test_a_masked_nan_is_gone(rig: Any) -> None:
    """Multiplying by zero would have kept it."""
    chain = rig({"w": torch.nn.Parameter(torch.ones(2))}, {"name": "mask", "masks": {"w": torch.tensor([0, 1])}})
    assert torch.equal(chain.step({"w": torch.tensor([float("nan"), 2.0])})["w"], torch.tensor([0.0, 2.0]))


def test_a_mask_that_does_not_fit_is_refused_at_registration(params: Callable[..., Any], rig: Any) -> None:
    """With the parameter and its shape."""
    with pytest.raises((GradientError, RegistrationError), match=r"'matrix' does not fit its shape \(7, 3\)"):
        rig(params(), {"name": "mask", "masks": {"matrix": torch.ones(2)}})


def test_freezing_everything_must_be_said() -> None:
    """`params: null` is more often a slip than a wish."""
    with pytest.raises(HooklineError, match="params=None would freeze everything"):
        Freeze(None)


def test_a_mask_of_nothing_is_refused() -> None:
    """It must say what."""
    with pytest.raises(HooklineError, match="give params= to zero whole gradients, or masks="):
        Mask()
