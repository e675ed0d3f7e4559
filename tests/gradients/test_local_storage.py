"""Test the access to the memory behind gradients."""

import pytest
import torch

from hookline.gradients.local_storage import group_by_kind, local_tensors, multiply_


def sparse() -> torch.Tensor:
    """Make a sparse tensor with row 1 twice and row 3 once, of four."""
    index, values = torch.tensor([[1, 1, 3]]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    return torch.sparse_coo_tensor(index, values, (4, 2), check_invariants=True)


def test_plain_tensors_are_their_own_memory() -> None:
    """The same list is returned."""
    tensors = [torch.ones(2), torch.nn.Parameter(torch.ones(3))]
    assert local_tensors(tensors) is tensors


def test_a_sparse_tensors_memory_is_its_values_added_up() -> None:
    """The values of a coalesced tensor can be written to; otherwise they are a copy."""
    assert local_tensors([sparse()])[0].tolist() == [[4.0, 6.0], [5.0, 6.0]]
    whole = sparse().coalesce()
    local_tensors([whole])[0].mul_(2.0)
    assert whole.to_dense()[1].tolist() == [8.0, 12.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(300,), ()])
def test_multiplying_is_bit_for_bit_a_loop(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """This includes half precision on the CPU, where foreach operations round a Python number first."""
    before = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for factor in (0.3, torch.tensor(0.3)):
        after = before.clone()
        multiply_([[after, before.clone()]], factor)
        assert torch.equal(after, before.clone().mul_(factor))


def test_tensors_are_grouped_by_device_and_dtype() -> None:
    """Groups are in the order of their first members; no tensors give no groups."""
    one, two, three = torch.zeros(1), torch.zeros(1).bfloat16(), torch.ones(1)
    found = group_by_kind([one, two, three])
    assert [len(kind) for kind in found] == [2, 1] and found[0][1] is three and group_by_kind([]) == []
