"""Norms alone are those of all statistics."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hookline.errors import HooklineError
from hookline.stats.columns import L2
from hookline.stats.norms import norms
from hookline.stats.statistics import summarize


def test_every_awkward_tensor(awkward_tensors: Callable[[], list[Tensor]]) -> None:
    """All kinds of tensors in one call: what overflows, underflows, is empty, odd in memory or not finite."""
    tensors = awkward_tensors()
    torch.testing.assert_close(norms(tensors), summarize(tensors)[:, L2], rtol=1e-5, atol=0, equal_nan=True)


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(0, 5000),
    many=st.integers(1, 70),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_many_tensors_alike(size: int, many: int, scale: float, dtype: torch.dtype) -> None:
    """Tensors of one shape are squared together, some at a time, and none gets another's norm."""
    generator = torch.Generator().manual_seed(size)
    tensors = [(torch.randn(size, generator=generator) * scale * (1 + index)).to(dtype) for index in range(many)]
    wanted = torch.stack([torch.linalg.vector_norm(tensor.double()) for tensor in tensors])
    torch.testing.assert_close(norms(tensors), wanted, rtol=1e-5, atol=0)


def test_millions_of_elements_lose_no_digits() -> None:
    """A large tensor is taken in blocks."""
    tensor = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0)) + 2
    assert norms([tensor]).item() == pytest.approx(torch.linalg.vector_norm(tensor.double()).item(), rel=1e-6)


def test_nothing_is_written() -> None:
    """The tensors are as they were, and so is what was found earlier, though memory is used again."""
    tensors = [torch.full((8,), float(value)) for value in range(5)]
    first = norms(tensors)
    kept = first.clone()
    norms([torch.randn(8) for _ in range(5)])
    assert torch.equal(first, kept)
    assert all(torch.equal(tensor, torch.full((8,), float(value))) for value, tensor in enumerate(tensors))


def test_it_refuses_by_name() -> None:
    """What has no norm here is named."""
    with pytest.raises(HooklineError, match=r"no statistics of embed\.weight: it has the layout torch\.sparse_coo"):
        norms([torch.ones(3), torch.ones(3).to_sparse()], ["head.weight", "embed.weight"])
