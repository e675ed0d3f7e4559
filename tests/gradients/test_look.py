"""What gradients have in common is looked at once, and again when they are others."""

from collections.abc import Callable

import torch

from hookline.gradients.look import Look, Seen, gradients_of

Params = dict[str, torch.nn.Parameter]


def sparse() -> torch.Tensor:
    """Row 1 twice, row 3 once, of four."""
    index, values = torch.tensor([[1, 1, 3]]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    return torch.sparse_coo_tensor(index, values, (4, 2), check_invariants=True)


def test_what_a_look_tells() -> None:
    """Of tensors that have all in common."""
    tensors = [torch.ones(2, 3), torch.nn.Parameter(torch.ones(3)).detach()]
    look = Look(tensors)
    assert look.plain and look.alike and look.aligned == (look.addresses[0] % 16 == look.addresses[1] % 16 == 0)
    assert look.addresses == tuple(tensor.data_ptr() for tensor in tensors)


def test_nothing_is_plain_and_alike() -> None:
    """Of no gradients everything is true."""
    look = Look([])
    assert look.plain and look.alike and look.addresses == ()


def test_gradients_are_looked_at_once() -> None:
    """As long as they are the same tensors, whatever list they come in; afterwards anew."""
    seen, tensors = Seen(), [torch.ones(2), torch.ones(3)]
    first = seen.look(tensors)
    assert seen.look(list(tensors)) is first and seen.numbers(tensors) is first.tensors
    some = seen.look(tensors[:1])
    assert some is not first and seen.look(tensors[:1]) is some
    seen.forget()
    assert seen.look(tensors) is not first


def test_whose_they_are_is_remembered(params: Callable[..., Params]) -> None:
    """Until somebody says that they may be others."""
    given, seen = params(), Seen()
    first = seen.gradients(given)
    assert all(one is other for one, other in zip(first.tensors, gradients_of(given), strict=True))
    given["matrix"].grad = torch.ones(7, 3)
    assert seen.gradients(given) is first
    seen.forget_owners()
    second = seen.gradients(given)
    assert second is not first and second.tensors[0] is given["matrix"].grad
    seen.forget()
    assert seen.gradients(given) is not second


def test_a_list_that_was_looked_at_may_be_changed_by_its_owner() -> None:
    """What is kept is a list of its own."""
    seen, tensors = Seen(), [torch.ones(2), torch.ones(3).double()]
    assert not seen.look(tensors).alike
    tensors.pop()
    assert seen.look(tensors).alike and len(seen.groups(tensors)) == 1


def test_the_memory_of_each_kind() -> None:
    """Grouped by dtype; of sparse gradients, their values."""
    seen = Seen()
    plain = [torch.ones(2), torch.ones(2).double(), torch.ones(3)]
    assert [[len(one) for one in group] for group in seen.groups(plain)] == [[2, 3], [2]] and seen.groups([]) == []
    assert seen.groups([sparse()])[0][0].tolist() == [[4.0, 6.0], [5.0, 6.0]]
