"""Facts about tensors are right, and equal facts are one object."""

from collections.abc import Callable
from weakref import ref

import pytest
import torch

from hookline.stats.tensor_meta import group_alike, tensor_meta

Make = Callable[[], torch.Tensor]


def sparse() -> torch.Tensor:
    """Make a sparse tensor with row 1 twice and row 3 once, of four."""
    index, values = torch.tensor([[1, 1, 3]]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    return torch.sparse_coo_tensor(index, values, (4, 2), check_invariants=True)


@pytest.mark.parametrize(
    ("make", "plain", "alike"),
    [
        (lambda: torch.ones(2).double(), True, False),
        (lambda: torch.ones(2, 3).t(), True, True),
        (lambda: torch.ones(2, dtype=torch.complex64), False, False),
        (sparse, False, True),
        (lambda: torch.eye(2).to_sparse_csr(), False, True),
        (lambda: torch.ones(2, device="meta"), True, False),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_one_unusual_tensor(make: Make, plain: bool, alike: bool) -> None:
    """One tensor among plain ones changes the facts, in each of the ways that matter."""
    found = tensor_meta([torch.ones(2), make()])
    assert (found.plain, found.alike) == (plain, alike)


def tensors() -> list[torch.Tensor]:
    """Make tensors of two shapes."""
    return [torch.randn(2, 3), torch.randn(5)]


def test_equal_facts_are_one_object() -> None:
    """Caches are keyed by it."""
    first = tensor_meta(tensors())
    assert tensor_meta(tensors()) is first and first.shapes == ((2, 3), (5,)) and first.dtypes == (torch.float32,) * 2
    assert first.on_cpu and not tensor_meta([torch.ones(2, device="meta")]).on_cpu


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3, 2),
        lambda: torch.randn(2, 3).bfloat16(),
        lambda: torch.randn(2, 3, device="meta"),
        lambda: torch.randn(2, 3, dtype=torch.complex64),
        lambda: torch.randn(6),
    ],
)
def test_different_facts_are_another_object(make: Make) -> None:
    """Another shape, dtype or device is not confused with an earlier one."""
    known = tensor_meta(tensors())
    other = [make(), torch.randn(5)]
    found = tensor_meta(other)
    assert found is not known and found.shapes == tuple(tensor.shape for tensor in other)
    assert found.dtypes == tuple(tensor.dtype for tensor in other) and tensor_meta(tensors()) is known


def test_tensors_are_grouped_by_shape_and_dtype() -> None:
    """A shape in two precisions is two groups."""
    some = tensor_meta([torch.ones(2), torch.ones(3), torch.ones(2).double(), torch.ones(2), torch.ones(2, 1)])
    assert group_alike(some.shapes, some.dtypes) == [[0, 3], [1], [2], [4]]


def test_no_tensor_is_kept_alive() -> None:
    """The cache holds facts, not tensors."""
    given = tensors()
    tensor_meta(given)
    watched = [ref(tensor) for tensor in given]
    del given
    assert all(one() is None for one in watched)
