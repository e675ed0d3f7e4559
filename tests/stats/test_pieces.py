"""Tensors of every kind are measured as the whole, dense tensors that they stand for."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hookline.errors import HooklineError
from hookline.stats.columns import L2
from hookline.stats.histograms import histograms
from hookline.stats.pieces import Pieces
from hookline.stats.statistics import summarize


def scattered() -> Tensor:
    """A matrix with many rows of zeros and one entry that is there twice."""
    indices = torch.tensor([[7, 2, 7, 11]])
    return torch.sparse_coo_tensor(indices, torch.randn(4, 5), (20, 5), check_invariants=True)


def test_plain_tensors_are_taken_as_they_are() -> None:
    """Nothing is copied, and the rows are `summarize`'s."""
    tensors = [torch.randn(30), torch.randn(4, 5)]
    pieces = Pieces(tensors)
    assert all(held is tensor for held, tensor in zip(pieces.dense, tensors, strict=True))
    assert torch.equal(pieces.summarize(), summarize(tensors))
    assert torch.equal(pieces.histograms(pieces.summarize()).counts, histograms(tensors).counts)


def test_sparse_tensors_count_their_zeros(assert_rows: Callable[..., None]) -> None:
    """A sparse tensor, not coalesced, beside a dense one has the row and the histogram of the dense one."""
    torch.manual_seed(0)
    sparse, other = scattered(), torch.randn(7)
    whole = [sparse.to_dense(), other]
    pieces = Pieces([sparse, other])
    rows = pieces.summarize()
    assert_rows(rows, whole)
    torch.testing.assert_close(pieces.norms(), summarize(whole)[:, L2])
    found, wanted = pieces.histograms(rows), histograms(whole)
    assert torch.equal(found.counts, wanted.counts) and torch.equal(found.tops, wanted.tops)


def test_complex_tensors_have_the_norm_of_their_parts() -> None:
    """A complex parameter's gradient is measured by its real and imaginary parts."""
    tensor = torch.randn(6, dtype=torch.complex64)
    assert Pieces([tensor]).norms().item() == pytest.approx(torch.linalg.vector_norm(tensor).item(), rel=1e-6)


def test_other_numbers_in_the_same_pieces() -> None:
    """`with_dense` measures other numbers and leaves the first ones alone."""
    pieces = Pieces([torch.ones(4), torch.ones(9)])
    assert pieces.with_dense([2 * torch.ones(4), torch.zeros(9)]).norms().tolist() == [4.0, 0.0]
    assert pieces.norms().tolist() == [2.0, 3.0]


def test_no_tensors() -> None:
    """Nothing is no error."""
    pieces = Pieces([])
    assert pieces.summarize().shape[0] == pieces.norms().shape[0] == 0
    assert pieces.histograms(pieces.summarize()).counts.shape[0] == 0


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_what_has_no_statistics_is_named() -> None:
    """A layout that is not handled is refused with the name."""
    with pytest.raises(HooklineError, match=r"no statistics of head: it has the layout torch\.sparse_csr"):
        Pieces([torch.eye(3).to_sparse_csr()], ["head"]).summarize()


def test_which_tensors_are_plain() -> None:
    """Sparse and complex ones are not."""
    assert Pieces([torch.ones(2), torch.nn.Parameter(torch.ones(2))]).plain and Pieces([]).plain
    assert not Pieces([torch.ones(2), scattered()]).plain
    assert not Pieces([torch.ones(2, dtype=torch.complex64)]).plain


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_several_devices(assert_rows: Callable[..., None]) -> None:
    """Rows come back in the order of the tensors, on the device of the first."""
    tensors = [torch.randn(10, device="cuda"), torch.randn(20), torch.randn(30, device="cuda"), torch.randn(5)]
    pieces = Pieces(tensors)
    rows = pieces.summarize()
    assert rows.device.type == "cuda"
    assert_rows(rows, tensors)
    counts = pieces.histograms(rows).counts
    assert counts.sum(dim=1).tolist() == [10, 20, 30, 5]
    torch.testing.assert_close(pieces.norms(), rows[:, L2])
