"""Test scaling: by a factor, to unit norm, to signs."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hookline import HooklineError
from hookline.gradients.transforms import Normalize, Scale

Make = Callable[..., Any]
NAMES = ("matrix", "kernel", "vector", "scalar")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_scale_multiplies_bit_for_bit(params: Make, apply: Make, dtype: torch.dtype) -> None:
    """The result is that of a loop, also in half precision, where foreach operations would round the factor first."""
    before, after = params(dtype), apply("scale", dtype=dtype, factor=0.3)
    assert all(torch.equal(after[name], before[name].grad * 0.3) for name in NAMES)
    assert after["frozen"] is None


@pytest.mark.parametrize("wrong", [math.nan, math.inf, True, "0.5", None])
def test_a_factor_must_be_finite(wrong: Any) -> None:
    """A factor of NaN would make every weight NaN, so it raises when the hook is made."""
    with pytest.raises(HooklineError, match=r"scale.factor: expected a finite number, got"):
        Scale(wrong)


def test_normalize_divides_all_by_the_global_norm(params: Make, apply: Make) -> None:
    """The gradients as one vector have norm one; each element is g / (norm + eps)."""
    before = params()
    flat = torch.cat([before[name].grad.reshape(-1).double() for name in NAMES])
    after = apply("normalize", eps=0.5)
    for name in NAMES:
        wanted = (before[name].grad.double() / (flat.norm() + 0.5)).float()
        torch.testing.assert_close(after[name], wanted, rtol=1e-5, atol=0)


def test_normalize_by_parameter_gives_each_its_own_length(params: Make, apply: Make) -> None:
    """Each gradient is divided by its own norm; one of zeros stays zero instead of becoming NaN."""
    before, after = params(), apply("normalize", by="parameter")
    for name in NAMES:
        wanted = before[name].grad / (before[name].grad.norm() + 1e-6)
        torch.testing.assert_close(after[name], wanted, rtol=1e-5, atol=0)


def test_normalize_leaves_zeros_zero(rig: Any) -> None:
    """With eps, a gradient of zeros does not become NaN, either way."""
    for by in ("all", "parameter"):
        param = torch.nn.Parameter(torch.ones(3))
        after = rig({"w": param}, {"name": "normalize", "by": by}).step({"w": torch.zeros(3)})
        assert torch.equal(after["w"], torch.zeros(3))


def test_normalize_lists_its_choices() -> None:
    """The error lists the choices."""
    with pytest.raises(HooklineError, match=r"normalize.by: invalid value 'layer'"):
        Normalize(by="layer")


def test_sign_keeps_signs_and_zeros(rig: Any) -> None:
    """Elements become -1, 0 or 1; NaN becomes what torch.sign returns."""
    param = torch.nn.Parameter(torch.ones(4))
    given = torch.tensor([-3.0, 0.0, 0.1, 1e-30])
    assert torch.equal(rig({"w": param}, "sign").step({"w": given})["w"], torch.tensor([-1.0, 0.0, 1.0, 1.0]))
