"""The ready links: identity and clipping."""

import math

import pytest
import torch

from hookline.errors import HooklineError
from hookline.gradients.transforms import ClipNorm, Identity
from hookline.gradients.view import Gradients


def twins(*, empty: bool = False) -> tuple[dict[str, torch.nn.Parameter], dict[str, torch.nn.Parameter]]:
    """Two sets of parameters with the same gradients, one of them without any."""
    sets = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(0)
        params = {name: torch.nn.Parameter(torch.zeros(7, 3)) for name in ("a", "b", "frozen")}
        for name in () if empty else ("a", "b"):
            params[name].grad = torch.randn(7, 3, generator=generator) * 5
        sets.append(params)
    return sets[0], sets[1]


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e6])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_clip_norm_is_bit_for_bit_torchs(max_norm: float, norm_type: float) -> None:
    """The same gradients and the same norm as clip_grad_norm_, above and below the limit."""
    ours, theirs = twins()
    clip = ClipNorm(max_norm, norm_type)
    clip.on_update(Gradients(ours))
    norm = torch.nn.utils.clip_grad_norm_(list(theirs.values()), max_norm, norm_type)
    assert clip.clipped_norm is not None and torch.equal(clip.clipped_norm, norm)
    for name in ("a", "b"):
        assert torch.equal(Gradients(ours)[name], Gradients(theirs)[name])
    assert ours["frozen"].grad is None


def test_without_gradients_the_norm_is_zero() -> None:
    """A frozen model is clipped without an error."""
    clip = ClipNorm(1.0)
    clip.on_update(Gradients(twins(empty=True)[0]))
    assert clip.clipped_norm is not None and clip.clipped_norm.item() == 0.0


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan])
def test_a_limit_must_be_above_zero(wrong: float) -> None:
    """Zero, negative and nan are refused when the hook is made."""
    with pytest.raises(HooklineError, match="max_norm must be above 0"):
        ClipNorm(wrong)


def test_clipping_is_an_intervention_that_must_not_fail_quietly() -> None:
    """A run without its clipping would be another run."""
    assert ClipNorm.intervenes and ClipNorm.on_error == "raise"


@pytest.mark.req("000-21")
def test_identity_returns_what_it_got_and_does_not_count_as_intervening() -> None:
    """The very mapping, nothing copied."""
    grads = Gradients(twins()[0])
    assert Identity().on_update(grads) is grads and not Identity.intervenes
