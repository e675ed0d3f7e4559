"""Test gradient centralization."""

from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_row_loses_its_mean(params: Callable[..., Any], apply: Callable[..., Any], dtype: torch.dtype) -> None:
    """A row is all dimensions but the first; vectors and scalars do not change."""
    before, after = params(dtype), apply("centralize", dtype=dtype)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 4e-2, torch.float64: 1e-12}[dtype]
    for name in ("matrix", "kernel"):
        rows = before[name].grad.double().flatten(1)
        wanted = (rows - rows.sum(1, keepdim=True) / rows.shape[1]).view(before[name].shape)
        torch.testing.assert_close(after[name].double(), wanted, rtol=tolerance, atol=tolerance)
    assert torch.equal(after["vector"], before["vector"].grad) and torch.equal(after["scalar"], before["scalar"].grad)


def test_by_hand(rig: Any) -> None:
    """(1, 3) has the mean 2; (4, 4) becomes zero."""
    chain = rig({"w": torch.nn.Parameter(torch.zeros(2, 2))}, "centralize")
    after = chain.step({"w": torch.tensor([[1.0, 3.0], [4.0, 4.0]])})["w"]
    assert torch.equal(after, torch.tensor([[-1.0, 1.0], [0.0, 0.0]]))
