"""What is true of tensors is found out once for those that are alike in every respect."""

from collections.abc import Callable

import pytest
import torch

from hookline.stats import kinds
from hookline.stats.kinds import kinds_of

Make = Callable[[], torch.Tensor]


def sparse() -> torch.Tensor:
    """Row 1 twice, row 3 once, of four."""
    index, values = torch.tensor([[1, 1, 3]]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    return torch.sparse_coo_tensor(index, values, (4, 2), check_invariants=True)


@pytest.mark.parametrize(
    ("make", "plain", "alike", "contiguous"),
    [
        (lambda: torch.ones(2).double(), True, False, True),
        (lambda: torch.ones(2, 3).t(), True, True, False),
        (lambda: torch.ones(2, dtype=torch.complex64), False, False, True),
        (sparse, False, True, False),
        (lambda: torch.ones(2, device="meta"), True, False, True),
    ],
)
def test_one_odd_tensor(make: Make, plain: bool, alike: bool, contiguous: bool) -> None:
    """Among plain ones, in each of the ways that matter."""
    found = kinds_of([torch.ones(2), make()])
    assert (found.plain, found.alike, found.contiguous) == (plain, alike, contiguous)


def test_whether_autograd_would_follow() -> None:
    """One tensor with a graph among others is enough, and is not taken for one without."""
    tensors = [torch.ones(2), torch.ones(2)]
    assert not kinds_of(tensors).in_graph
    tensors[1].requires_grad_()
    assert kinds_of(tensors).in_graph and kinds_of(list(map(torch.exp, tensors))).in_graph


def test_compressed_tensors_are_not_plain() -> None:
    """They refuse to say whether they are contiguous."""
    with pytest.warns(UserWarning, match="Sparse CSR"):
        compressed = torch.eye(2).to_sparse_csr()
    assert not kinds_of([compressed]).plain


def tensors() -> list[torch.Tensor]:
    """Two shapes."""
    return [torch.randn(2, 3), torch.randn(5)]


@pytest.mark.parametrize("guarded", [True, False])
def test_tensors_alike_have_one_object(guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not torch has the means to see it in one call."""
    if not guarded:
        monkeypatch.setattr(kinds, "Guards", None)
    kinds._recent.clear()
    first = kinds_of(tensors())
    assert kinds_of(tensors()) is first and first.shapes == ((2, 3), (5,)) and first.dtypes == (torch.float32,) * 2
    assert bool(kinds._recent) is guarded


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3, 2),
        lambda: torch.randn(3, 2).t(),
        lambda: torch.randn(2, 3).bfloat16(),
        lambda: torch.randn(2, 3, device="meta"),
        lambda: torch.randn(2, 3, dtype=torch.complex64),
        lambda: torch.randn(6),
    ],
)
def test_what_differs_in_anything_is_found_out_anew(make: Make) -> None:
    """Another shape, order in memory, dtype or device is not taken for what was seen before."""
    known = kinds_of(tensors())
    odd = [make(), torch.randn(5)]
    found = kinds_of(odd)
    assert found is not known and found.shapes == tuple(tensor.shape for tensor in odd)
    assert found.dtypes == tuple(tensor.dtype for tensor in odd) and found.contiguous == odd[0].is_contiguous()
    assert kinds_of(tensors()) is known


def test_where_those_of_one_shape_and_dtype_stand() -> None:
    """A shape in two precisions is two kinds."""
    some = [torch.ones(2), torch.ones(3), torch.ones(2).double(), torch.ones(2)]
    assert kinds_of(some).places_alike == [[0, 3], [1], [2]]


def test_no_tensor_is_kept_alive() -> None:
    """What is remembered are facts."""
    from weakref import ref

    given = tensors()
    kinds_of(given)
    watched = [ref(tensor) for tensor in given]
    del given
    assert all(one() is None for one in watched)
