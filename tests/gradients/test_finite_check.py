"""Test that a hook which makes gradients non-finite is named and undone."""

import math
from typing import Any

import pytest
import torch

from hookline import UpdateHook
from hookline.errors import GradientError


class Spoils(UpdateHook):
    """A hook that makes one gradient non-finite: in place, or in what it returns."""

    def __init__(self, inplace: bool = False, value: float = math.nan) -> None:
        self.inplace, self.value = inplace, value

    def on_update(self, grads: Any) -> Any:
        if self.inplace:
            grads["b"][0] = self.value
            return None
        return {**grads, "b": torch.full((2,), self.value)}


def chain_of(rig: Any, *hooks: Any, **options: Any) -> Any:
    """Make a chain over two parameters."""
    made = rig({name: torch.nn.Parameter(torch.zeros(2)) for name in "ab"})
    for hook in hooks:
        made.registry.register(hook, **{"on_error": "warn", **options})
    return made


FINITE = {"a": torch.ones(2), "b": torch.ones(2)}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.hooks_fail(raises=GradientError)
def test_a_hook_that_writes_nan_is_named_and_undone(rig: Any, inplace: bool, value: float) -> None:
    """With the policy 'warn' the gradients are restored, and the message names the parameter."""
    chain = chain_of(rig, Spoils(inplace, value))
    incidents: list[Any] = []
    chain.registry.failures.subscribe(incidents.append)
    after = chain.step(FINITE)
    assert torch.equal(after["a"], FINITE["a"]) and torch.equal(after["b"], FINITE["b"])
    assert [incident.hook for incident in incidents] == ["spoils"] and isinstance(incidents[0].error, GradientError)
    assert "made the gradient of 'b' non-finite" in incidents[0].message


def test_a_function_that_writes_in_place_undeclared_is_named(rig: Any) -> None:
    """Only the norms before tell that the gradients were finite."""

    def spoils(grads: Any) -> Any:
        grads["b"].fill_(math.nan)
        return grads

    chain = chain_of(rig, spoils, event="update", on_error="raise")
    with pytest.raises(GradientError, match="made the gradient of 'b' non-finite"):
        chain.step(FINITE)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.hooks_fail(raises=GradientError)
def test_on_a_gpu_only_hooks_that_ask_are_checked(rig: Any, asks: bool) -> None:
    """On a device the check would wait, so hooks have to ask for it."""
    chain = rig({name: torch.nn.Parameter(torch.zeros(2, device="cuda")) for name in "ab"})
    hook = Spoils(inplace=True)
    if asks:
        hook.check_finite = True
    chain.registry.register(hook, on_error="warn")
    after = chain.step({name: grad.cuda() for name, grad in FINITE.items()})
    assert after["b"].isnan().any().item() is not asks
    assert chain.registry.entry("spoils").failures.total == asks


def test_the_policy_raise_ends_the_run(rig: Any) -> None:
    """The hook is in the exception's notes."""
    with pytest.raises(GradientError) as caught:
        chain_of(rig, Spoils(), on_error="raise").step(FINITE)
    assert caught.value.__notes__ == ["raised by hook 'spoils' in on_update, step 1"]


@pytest.mark.hooks_fail(raises=GradientError)
def test_three_times_in_a_row_disable_the_hook(rig: Any) -> None:
    """A non-finite result counts as any other failure."""
    chain = chain_of(rig, Spoils())
    for _ in range(3):
        chain.step(FINITE)
    assert not chain.registry.is_enabled("spoils")


def test_gradients_that_were_non_finite_before_are_no_failure(rig: Any) -> None:
    """A hook does not fail because the backward pass overflowed."""
    chain = chain_of(rig, Spoils())
    after = chain.step({"a": torch.tensor([math.inf, 1.0]), "b": torch.ones(2)})
    assert after["b"].isnan().all() and chain.registry.entry("spoils").failures.total == 0


def test_a_norm_that_overflows_is_not_a_failure(rig: Any) -> None:
    """If a norm overflows although the gradients are finite, the elements decide."""
    chain = chain_of(rig, Spoils(value=3e38), on_error="raise")
    assert chain.step({"a": torch.full((2,), 3e38), "b": torch.ones(2)})["b"].isfinite().all()
    spoiled = chain_of(rig, Spoils(), on_error="raise")
    with pytest.raises(GradientError, match="'b'"):
        spoiled.step({"a": torch.full((2,), 3e38), "b": torch.ones(2)})


def test_no_gradients_are_not_a_failure(rig: Any) -> None:
    """There may be no gradients before the hook or after it."""

    class Looks(UpdateHook):
        def on_update(self, grads: Any) -> Any:
            return grads

    chain = chain_of(rig, Looks(), on_error="raise")
    assert chain.step() == {"a": None, "b": None}


def test_a_hook_may_decline_the_check(rig: Any) -> None:
    """With check_finite = False nothing is read, and NaN passes."""
    hook = Spoils()
    hook.check_finite = False
    chain = chain_of(rig, hook)
    assert chain.step(FINITE)["b"].isnan().all() and not chain.registry.dispatch_table.argument_costs


def test_with_debug_every_hook_is_checked(rig: Any) -> None:
    """The policy of every hook is 'raise' then, so the run ends."""
    hook = Spoils()
    hook.check_finite = False
    chain = chain_of(rig, hook)
    chain.registry.failures.debug = True
    with pytest.raises(GradientError, match="'b'"):
        chain.step(FINITE)


@pytest.mark.hooks_fail(raises=GradientError)
def test_the_wait_has_a_row_in_the_cost_table(rig: Any) -> None:
    """Each check is counted."""
    chain = chain_of(rig, Spoils())
    for _ in range(2):
        chain.step(FINITE)
    assert chain.registry.dispatch_table.argument_costs["whether spoils left finite gradients"].calls == 2


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.hooks_fail(raises=GradientError)
def test_a_gradient_that_a_failing_hook_added_is_removed(rig: Any, in_place: bool) -> None:
    """A gradient that was None is None again."""

    class Adds(UpdateHook):
        inplace = in_place

        def on_update(self, grads: Any) -> Any:
            return {**grads, "b": torch.full((2,), math.nan)}

    chain = chain_of(rig, Adds())
    assert chain.step({"a": torch.ones(2)})["b"] is None


def test_a_hook_that_spoils_a_later_step_is_named(rig: Any) -> None:
    """Also if it replaced all gradients before, and not if what it got was not finite."""
    factors = [1.0, 2.0, math.nan, math.nan]

    def replaces(grads: Any) -> Any:
        factor = factors.pop(0)
        return {name: grad * factor for name, grad in grads.items()}

    chain = chain_of(rig, replaces, event="update", on_error="raise")
    chain.step(FINITE)
    chain.step(FINITE)
    chain.step({"a": torch.tensor([math.inf, 1.0]), "b": torch.ones(2)})  # It did not make these non-finite.
    with pytest.raises(GradientError, match="made the gradient of 'a' \\(2 parameters in all\\) non-finite"):
        chain.step(FINITE)
    assert torch.equal(chain.params["a"].grad, FINITE["a"])


def test_a_hook_that_writes_through_views_is_named(rig: Any) -> None:
    """What it returns is not the tensor that it got, but has its memory."""
    factors = [1.0, math.nan]

    def writes(grads: Any) -> Any:
        factor = factors.pop(0)
        return {name: grad.view(-1).mul_(factor).view(grad.shape) for name, grad in grads.items()}

    chain = chain_of(rig, writes, event="update", on_error="raise")
    chain.step(FINITE)
    with pytest.raises(GradientError, match="made the gradient of 'a'"):
        chain.step(FINITE)
