"""Test freezing and masking by what the optimizer does afterwards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hookline import HooklineError
from hookline.core.schedule import Reading
from hookline.errors import GradientError, RegistrationError
from hookline.gradients.transforms import Freeze, Mask


def test_freeze_removes_the_gradients(params: Callable[..., Any], apply: Callable[..., Any]) -> None:
    """Selected gradients are None, the others are the same objects."""
    after, before = apply("freeze", params=["matrix", "vec*"]), params()
    assert after["matrix"] is None and after["vector"] is None
    assert torch.equal(after["kernel"], before["kernel"].grad)


def test_a_frozen_parameter_does_not_move_under_adamw_and_a_zeroed_one_does(rig: Any) -> None:
    """Momentum and weight decay move a parameter with a gradient of zeros; None stops both."""
    moved = {}
    for hook in ("freeze", "mask"):
        param = torch.nn.Parameter(torch.ones(3))
        chain = rig({"w": param}, {"name": hook, "params": "w", "start": 2})
        optimizer = torch.optim.AdamW([param], lr=0.1)
        param.grad = torch.ones(3)
        optimizer.step()
        before = param.detach().clone()
        chain.registry.decide_due_hooks(Reading(steps=2, batches=2, epochs=1))
        chain.step({"w": torch.ones(3)})
        optimizer.step()
        moved[hook] = not torch.equal(param.detach(), before)
    assert moved == {"freeze": False, "mask": True}


def test_mask_zeroes_whole_gradients(params: Callable[..., Any], apply: Callable[..., Any]) -> None:
    """Masked gradients are zeros, not None."""
    after, before = apply("mask", params="matrix"), params()
    assert torch.equal(after["matrix"], torch.zeros(7, 3)) and torch.equal(after["vector"], before["vector"].grad)


def test_mask_keeps_what_its_tensor_keeps(params: Callable[..., Any], apply: Callable[..., Any]) -> None:
    """A mask of rows broadcasts, also over NaN; parameters without a mask do not change."""
    keep = torch.tensor([[True, False, True]])
    after, before = apply("mask", masks={"mat*": keep, "vector": torch.tensor([1, 0, 0, 0, 1])}), params()
    assert torch.equal(after["matrix"], torch.where(keep, before["matrix"].grad, 0.0))
    assert after["vector"].nonzero().flatten().tolist() == [0, 4]
    assert torch.equal(after["kernel"], before["kernel"].grad)


def test_a_masked_nan_is_gone(rig: Any) -> None:
    """Multiplying by zero would keep it."""
    chain = rig({"w": torch.nn.Parameter(torch.ones(2))}, {"name": "mask", "masks": {"w": torch.tensor([0, 1])}})
    assert torch.equal(chain.step({"w": torch.tensor([float("nan"), 2.0])})["w"], torch.tensor([0.0, 2.0]))


def test_a_mask_that_does_not_fit_raises_at_registration(params: Callable[..., Any], rig: Any) -> None:
    """The error has the parameter and its shape."""
    with pytest.raises((GradientError, RegistrationError), match=r"'matrix' does not fit its shape \(7, 3\)"):
        rig(params(), {"name": "mask", "masks": {"matrix": torch.ones(2)}})


def test_freezing_everything_must_be_explicit() -> None:
    """`params: null` is more often a mistake than meant."""
    with pytest.raises(HooklineError, match="params=None would freeze everything"):
        Freeze(None)


def test_a_mask_of_nothing_raises() -> None:
    """Without params and masks the hook raises."""
    with pytest.raises(HooklineError, match="pass params= to zero whole gradients, or masks="):
        Mask()
