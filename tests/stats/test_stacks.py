"""Tensors alike are read together, and none gets another's numbers."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline.stats import stacks
from hookline.stats.stacks import squares_of_rows, sums_of_rows

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.bool]


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 300), many=st.integers(1, 40), dtype=st.sampled_from(DTYPES), together=st.integers(1, 2000))
def test_every_row_is_its_tensors(size: int, many: int, dtype: torch.dtype, together: int) -> None:
    """Of any dtype, however many fit into one stack."""
    generator = torch.Generator().manual_seed(size)
    tensors = [(torch.randn(size, generator=generator).relu() * (1 + index)).to(dtype) for index in range(many)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stacks, "TOGETHER", together)
        totals, squares, low, high, others = sums_of_rows(tensors)
        np.testing.assert_array_equal(squares_of_rows(tensors), squares)
    wide = [tensor.double() for tensor in tensors]
    np.testing.assert_allclose(totals, [one.sum().item() for one in wide], rtol=1e-5)
    np.testing.assert_allclose(squares, [one.square().sum().item() for one in wide], rtol=1e-5)
    assert low.tolist() == [one.min().item() for one in wide] and high.tolist() == [one.max().item() for one in wide]
    assert others.tolist() == [one.count_nonzero().item() for one in wide]


@pytest.mark.parametrize("view", [lambda base: base.t(), lambda base: base[:, ::2], lambda base: base[0, 0]])
def test_shapes_and_strides_do_not_matter(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Views that do not lie one behind the other, and scalars."""
    tensors = [view(torch.randn(6, 8)) for _ in range(5)]
    np.testing.assert_allclose(squares_of_rows(tensors), [one.double().square().sum() for one in tensors], rtol=1e-5)


def test_what_is_not_finite_is_seen_and_spoils_no_other() -> None:
    """A NaN, an infinity and an overflow show in their own columns, and no warning of NumPy's gets out."""
    tensors = [torch.randn(50) for _ in range(5)]
    tensors[1][7], tensors[2][7], tensors[3][7] = torch.nan, torch.inf, 1e30
    found = sums_of_rows(tensors)
    assert np.isfinite(found[1]).tolist() == [True, False, False, False, True]
    assert np.isnan(found[2:4]).sum(axis=0).tolist() == [0, 2, 0, 0, 0] and found[3, 2] == np.inf
