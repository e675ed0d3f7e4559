"""Rows from sums are those of the tensors, and what sums cannot tell is named."""

import numpy as np
import torch

from hookline.stats.from_sums import rows_from_sums
from hookline.stats.torch_path import statistics_of_rows


def sums_of(tensor: torch.Tensor) -> list[float]:
    """As if somebody had read it."""
    flat = tensor.double()
    return [flat.sum().item(), flat.square().sum().item(), flat.min().item(), flat.max().item(), flat.count_nonzero()]


def test_rows_are_those_of_the_tensors() -> None:
    """All ten columns, of tensors of several sizes."""
    tensors = [torch.randn(size).relu() for size in (5, 80, 1000)]
    sums = np.array([sums_of(tensor) for tensor in tensors]).T
    rows, unsound = rows_from_sums(sums, np.array([5.0, 80.0, 1000.0]))
    expected = torch.cat([statistics_of_rows(tensor.double().unsqueeze(0)) for tensor in tensors])
    torch.testing.assert_close(torch.from_numpy(rows), expected, rtol=1e-9, atol=1e-12)
    assert unsound == []


def test_what_sums_do_not_tell_is_named() -> None:
    """A NaN, an infinity, a far mean and faint values; one that is all zeros is sound, and so are its neighbours."""
    odd = [torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("inf")]), torch.randn(9) + 1e4]
    tensors = [torch.randn(9), *odd, torch.randn(9) * 1e-20, torch.zeros(9), torch.full((9,), 2.0), torch.randn(9)]
    sums = np.array([sums_of(tensor) for tensor in tensors]).T
    with np.errstate(invalid="ignore"):
        rows, unsound = rows_from_sums(sums, np.array([float(tensor.numel()) for tensor in tensors]))
    assert unsound == [1, 2, 3, 4, 6]
    assert rows[5].tolist() == [9, 0, 0, 0, 0, 0, 0, 9, 0, 0]
