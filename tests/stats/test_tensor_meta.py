"""Facts about tensors are right, tensors are grouped by what they are like, and writes to them are noticed."""

from collections.abc import Callable

import pytest
import torch

from hookline._tensors import DEVICE_AND_DTYPE, SHAPE_AND_DTYPE, TensorVersions, indices_by, tensor_meta

Make = Callable[[], torch.Tensor]


def sparse() -> torch.Tensor:
    """Make a sparse tensor with row 1 twice and row 3 once, of four."""
    index, values = torch.tensor([[1, 1, 3]]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    return torch.sparse_coo_tensor(index, values, (4, 2), check_invariants=True)


@pytest.mark.parametrize(
    ("make", "plain", "uniform"),
    [
        (lambda: torch.ones(2).double(), True, False),
        (lambda: torch.ones(2, 3).t(), True, True),
        (lambda: torch.nn.Parameter(torch.ones(2)), True, True),
        (lambda: torch.ones(2, dtype=torch.complex64), False, False),
        (sparse, False, False),
        (lambda: torch.eye(2).to_sparse_csr(), False, False),
        (lambda: torch.ones(2, device="meta"), True, False),
    ],
    ids=["double", "transposed", "parameter", "complex", "sparse", "sparse by rows", "meta"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_one_unusual_tensor(make: Make, plain: bool, uniform: bool) -> None:
    """One tensor among plain ones changes the facts, in each of the ways that matter."""
    found = tensor_meta([torch.ones(2), make()])
    assert (found.plain, found.uniform) == (plain, uniform)


def test_devices_are_each_named_once() -> None:
    """No tensors have no device, and are not uniform."""
    found = tensor_meta([torch.ones(2), torch.ones(3), torch.ones(2, device="meta")])
    assert found.devices == {torch.device("cpu"), torch.device("meta")}
    nothing = tensor_meta([])
    assert nothing.plain and not nothing.devices and not nothing.uniform


def test_tensors_are_grouped_by_what_is_asked() -> None:
    """A shape in two precisions is two groups, in the order in which they first appear."""
    tensors = [torch.ones(2), torch.ones(3), torch.ones(2).double(), torch.ones(2), torch.ones(2, 1)]
    assert indices_by(SHAPE_AND_DTYPE, tensors) == [[0, 3], [1], [2], [4]]
    assert indices_by(DEVICE_AND_DTYPE, tensors) == [[0, 1, 3, 4], [2]]
    assert indices_by(SHAPE_AND_DTYPE, []) == []


def test_a_snapshot_matches_until_a_tensor_is_written_to() -> None:
    """It matches the same tensors in the same order, not copies of them and not one that was written to."""
    tensors = [torch.randn(5), torch.randn(6)]
    snapshot = TensorVersions(tensors)
    assert (
        snapshot.matches(tensors)
        and not snapshot.matches(tensors[::-1])
        and not snapshot.matches([tensor.clone() for tensor in tensors])
    )
    tensors[1].zero_()
    assert not snapshot.matches(tensors)
    with torch.inference_mode():
        assert not TensorVersions(inference := [torch.randn(5)]).matches(inference)


def test_a_new_tensor_at_an_old_address_is_not_an_old_one() -> None:
    """Nothing is kept alive, so ids come back; a new tensor is not confused with an old one."""
    for _ in range(50):
        snapshot = TensorVersions([torch.ones(3)])
        assert not snapshot.matches([torch.ones(3)])
