"""Test that clipping equals torch's bit for bit, and AGC its formula."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hookline import HooklineError
from hookline.gradients.transforms import ClipAdaptive, ClipNorm, ClipValue

Make = Callable[..., Any]
COMPLEX = {"frequencies": torch.complex64, "gains": torch.float32}
CLIP_VALUE = {"name": "clip_value", "max_value": 1.0}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Check that gradients are equal bit for bit."""
    for name, param in theirs.items():
        assert (ours[name].grad is None) == (param.grad is None)
        assert param.grad is None or torch.equal(ours[name].grad, param.grad), name


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e6])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_clip_norm_is_bit_for_bit_torchs(
    rig: Any, params: Make, max_norm: float, norm_type: float, dtype: torch.dtype
) -> None:
    """Gradients and norm equal those of clip_grad_norm_, above and below the limit, in every precision."""
    ours, theirs = params(dtype), params(dtype)
    chain = rig(ours, {"name": "clip_norm", "max_norm": max_norm, "norm_type": norm_type})
    chain.step()
    norm = torch.nn.utils.clip_grad_norm_(list(theirs.values()), max_norm, norm_type)
    assert torch.equal(chain.clipped[0], norm)
    assert_same(ours, theirs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_clip_norm_is_bit_for_bit_torchs_on_a_device(rig: Any, params: Make, dtype: torch.dtype) -> None:
    """The fused kernels round as torch's clipping does."""
    sets = []
    for _ in range(2):
        made = {name: torch.nn.Parameter(param.detach().cuda()) for name, param in params(dtype).items()}
        for name, param in params(dtype).items():
            made[name].grad = None if param.grad is None else param.grad.cuda()
        sets.append(made)
    rig(sets[0], {"name": "clip_norm", "max_norm": 1.0}).step()
    torch.nn.utils.clip_grad_norm_(list(sets[1].values()), 1.0)
    assert_same(*sets)


@pytest.mark.parametrize("between", [[], ["measure"], [{"name": "scale", "factor": 1.0}]])
def test_a_second_clipping_equals_torchs(params: Make, rig: Any, between: list[Any]) -> None:
    """What the first one left is read, not computed; a measurement in between changes nothing."""
    for seed in range(20):
        ours, theirs = params(seed=seed), params(seed=seed)
        first, second = {"name": "clip_norm", "max_norm": 7.3}, {"name": "clip_norm", "as": "second", "max_norm": 1.7}
        rig(ours, first, *between, second).step()
        for max_norm in (7.3, 1.7):
            torch.nn.utils.clip_grad_norm_(list(theirs.values()), max_norm)
        assert_same(ours, theirs)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_complex_gradients_are_clipped_as_torch_clips_them(rig: Any, norm_type: float) -> None:
    """Beside a real parameter, each element of a complex one counts by its absolute value."""
    sets = []
    for _ in range(2):
        stream = torch.Generator().manual_seed(0)
        made = {name: torch.nn.Parameter(torch.zeros(3, dtype=dtype)) for name, dtype in COMPLEX.items()}
        for param in made.values():
            param.grad = torch.randn(3, dtype=param.dtype, generator=stream)
        sets.append(made)
    chain = rig(sets[0], {"name": "clip_norm", "max_norm": 0.5, "norm_type": norm_type})
    chain.step()
    norm = torch.nn.utils.clip_grad_norm_(list(sets[1].values()), 0.5, norm_type)
    torch.testing.assert_close(chain.clipped[0], norm)
    for name in COMPLEX:
        torch.testing.assert_close(sets[0][name].grad, sets[1][name].grad)


def test_clip_norm_is_torchs_over_several_precisions(rig: Any, params: Make) -> None:
    """Mixed dtypes are clipped together, as clip_grad_norm_ does."""
    both = [{**params(), **{f"{k}_16": v for k, v in params(torch.bfloat16, 1).items()}} for _ in range(2)]
    rig(both[0], {"name": "clip_norm", "max_norm": 1.0}).step()
    torch.nn.utils.clip_grad_norm_(list(both[1].values()), 1.0)
    assert_same(*both)


@pytest.mark.parametrize("hook", [{"name": "clip_norm", "max_norm": 1.0}, CLIP_VALUE, {"name": "clip_adaptive"}])
def test_without_gradients_the_norm_is_zero(rig: Any, params: Make, hook: dict[str, Any]) -> None:
    """A model without gradients is clipped without an error."""
    chain = rig({"frozen": params()["frozen"]}, hook)
    chain.step()
    assert chain.clipped[0].item() == 0.0


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan])
def test_a_limit_must_be_above_zero(wrong: float) -> None:
    """Zero, negative numbers and NaN raise when the hook is made."""
    with pytest.raises(HooklineError, match=r"clip_norm.max_norm: expected a number, above 0"):
        ClipNorm(wrong)
    with pytest.raises(HooklineError, match=r"clip_value.max_value: expected a number, above 0"):
        ClipValue(wrong)
    with pytest.raises(HooklineError, match=r"clip_adaptive.clipping: expected a number, above 0"):
        ClipAdaptive(wrong)


@pytest.mark.parametrize("hook", [ClipNorm, ClipValue, ClipAdaptive])
def test_clipping_intervenes_and_its_failure_ends_the_run(hook: Any) -> None:
    """A run without its clipping would be another run, so a failure ends it."""
    assert hook.intervenes and hook.on_error == "raise" and hook.clips


@pytest.mark.parametrize("dtype", DTYPES)
def test_clip_value_is_bit_for_bit_torchs(rig: Any, params: Make, dtype: torch.dtype) -> None:
    """Gradients equal those of clip_grad_value_; a NaN stays."""
    ours, theirs = params(dtype), params(dtype)
    for one in (ours, theirs):
        one["vector"].grad[0] = math.nan
    rig(ours, {"name": "clip_value", "max_value": 0.5}).step()
    torch.nn.utils.clip_grad_value_(list(theirs.values()), 0.5)
    assert ours["vector"].grad.isnan().sum() == 1
    for one in (ours, theirs):
        one["vector"].grad.nan_to_num_()
    assert_same(ours, theirs)


def agc(weight: torch.Tensor, grad: torch.Tensor, clipping: float, eps: float) -> torch.Tensor:
    """Apply the definition to one unit after the other: a gradient above its limit is scaled to it."""
    one_vector = weight.squeeze().dim() <= 1
    units = [(weight, grad)] if one_vector else list(zip(weight, grad, strict=True))
    out = []
    for w, g in units:
        most = clipping * max(w.norm().item(), eps)
        out.append(g if g.norm().item() < most else g * (most / max(g.norm().item(), 1e-6)))
    return out[0] if one_vector else torch.stack(out)


@pytest.mark.parametrize("clipping", [0.01, 0.5, 3.0])
def test_adaptive_clipping_is_its_definition(params: Make, apply: Make, clipping: float) -> None:
    """Rows of matrices and kernels, and whole vectors and scalars, are units; eps lets small weights move."""
    before = params()
    for eps in (1e-3, 2.0):
        after = apply("clip_adaptive", clipping=clipping, eps=eps)
        for name in ("matrix", "kernel", "vector", "scalar"):
            wanted = agc(before[name].detach(), before[name].grad, clipping, eps)
            torch.testing.assert_close(after[name], wanted, rtol=1e-5, atol=1e-7)


def test_adaptive_clipping_by_hand(rig: Any) -> None:
    """Weights (3, 4) of norm 5 allow a gradient norm of 0.5 at clipping 0.1; a row of zeros counts as eps."""
    param = torch.nn.Parameter(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    param.grad = torch.tensor([[6.0, 8.0], [0.0, 1.0]])
    after = rig({"w": param}, {"name": "clip_adaptive", "clipping": 0.1, "eps": 0.01}).step()
    torch.testing.assert_close(after["w"], torch.tensor([[0.3, 0.4], [0.0, 0.001]]))


def test_every_clipping_hook_reports_the_norm_before_it(params: Callable[..., Any], rig: Any) -> None:
    """on_gradient_clip gets it, and it is the step's norm if the hook selects all parameters."""
    norm = torch.nn.utils.get_total_norm([param.grad for param in params().values() if param.grad is not None])
    for hook in ({"name": "clip_norm", "max_norm": 1.0}, CLIP_VALUE, "clip_adaptive"):
        whole = rig(params(), hook)
        whole.step()
        assert torch.equal(whole.clipped[0], norm) and whole.clipped[1]
    part = rig(params(), {**CLIP_VALUE, "params": "vector"})
    part.step()
    assert not part.clipped[1]


@pytest.mark.parametrize("wrong", [{"max_norm": 0}, {"max_norm": "1e-3"}, {"norm_type": 0}, {"norm_type": -1}])
def test_invalid_limits_raise(wrong: dict[str, Any]) -> None:
    """Invalid limits raise when the hook is made."""
    with pytest.raises(HooklineError, match=f"clip_norm.{next(iter(wrong))}: expected a number, above 0"):
        ClipNorm(**{"max_norm": 1.0, **wrong})
