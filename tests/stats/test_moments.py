"""Mean and standard deviation agree with torch's and survive what breaks a one-pass formula."""

import pytest
import torch

from hookline.stats.moments import mean_and_std


@pytest.mark.req("000-11")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_are_torchs_own(dtype: torch.dtype) -> None:
    """Mean and std equal torch.mean and torch.std."""
    tensor = torch.randn(37, 11, dtype=dtype, generator=torch.Generator().manual_seed(0))
    mean, std = mean_and_std(tensor)
    torch.testing.assert_close(mean, tensor.mean())
    torch.testing.assert_close(std, tensor.std())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_narrow_types_are_widened_first(dtype: torch.dtype) -> None:
    """Half precision and integers are measured in float32."""
    tensor = (torch.arange(100) % 7).to(dtype)
    mean, std = mean_and_std(tensor)
    assert mean.dtype == std.dtype == torch.float32
    torch.testing.assert_close(mean, tensor.float().mean())
    torch.testing.assert_close(std, tensor.float().std())


def test_a_large_mean_costs_no_digits() -> None:
    """Two passes: the spread around ten thousand is found as exactly as around zero."""
    spread = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    _, std = mean_and_std(spread + 1e4)
    torch.testing.assert_close(std, spread.std(), rtol=1e-3, atol=1e-3)


def test_a_single_element_has_no_spread_and_nothing_has_no_mean() -> None:
    """One element gives 0 instead of nan and its warning; none gives nan without an error."""
    mean, std = mean_and_std(torch.tensor([3.0]))
    assert (mean.item(), std.item()) == (3.0, 0.0)
    assert mean_and_std(torch.empty(0))[0].isnan()


def test_non_finite_values_show() -> None:
    """A nan in the activations is not smoothed away."""
    mean, std = mean_and_std(torch.tensor([1.0, float("nan")]))
    assert mean.isnan() and std.isnan()


def test_no_graph_is_kept() -> None:
    """Measuring an activation that requires grad builds nothing."""
    mean, std = mean_and_std(torch.ones(3, requires_grad=True) * 2)
    assert not mean.requires_grad and not std.requires_grad
