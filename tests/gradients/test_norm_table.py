"""The row of norms: replaced, extended and gathered from without taking it apart."""

import torch
from torch import Tensor

from hookline.gradients.norm_table import NormTable


def tensors(many: int) -> list[Tensor]:
    """Some that differ."""
    return [torch.full((2,), float(number)) for number in range(many)]


def filled(memory: list[Tensor]) -> NormTable:
    """A table that has 0, 1, 2, … for them."""
    table = NormTable()
    table.put(memory, torch.arange(float(len(memory))))
    return table


def test_at_first_everything_is_stale() -> None:
    """And nothing once it was put."""
    memory = tensors(3)
    assert NormTable().stale(memory) == [0, 1, 2]
    table = filled(memory)
    assert table.stale(memory) == [] and table.row(memory).tolist() == [0.0, 1.0, 2.0]


def test_what_was_written_to_is_stale() -> None:
    """Whether all are asked for or some, in whatever order."""
    memory = tensors(4)
    table = filled(memory)
    memory[2].add_(1)
    assert table.stale(memory) == [2] and table.stale([memory[3], memory[2]]) == [1]


def test_a_few_are_replaced() -> None:
    """The others stay, and so does a row that was handed out before."""
    memory = tensors(4)
    table = filled(memory)
    before = table.row(memory)
    memory[1].add_(1)
    memory[3].add_(1)
    table.put_some(memory, [1, 3], torch.tensor([10.0, 30.0]))
    assert table.stale(memory) == []
    assert table.row(memory).tolist() == [0.0, 10.0, 2.0, 30.0] and before.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_other_choices_are_gathered() -> None:
    """In their own order; a list of the same tensors need not be the same list."""
    memory = tensors(4)
    table = filled(memory)
    assert table.row([memory[3], memory[0]]).tolist() == [3.0, 0.0] and table.row(list(memory)) is table.row(memory)


def test_new_ones_come_behind() -> None:
    """Together with some that are there already."""
    memory, other = tensors(2), torch.ones(5)
    table = filled(memory)
    table.put([other, memory[0]], torch.tensor([7.0, 8.0]))
    assert table.stale([*memory, other]) == [] and table.row([*memory, other]).tolist() == [8.0, 1.0, 7.0]
    other.zero_()
    assert table.stale([other, memory[1]]) == [0]
    table.put_some([other, memory[1]], [0], torch.tensor([9.0]))
    assert table.row([memory[1], other]).tolist() == [1.0, 9.0]


def test_no_address_is_taken_for_another_tensors() -> None:
    """The table holds on to what it has norms of."""
    table = NormTable()
    for value in range(5):
        fresh = [torch.full((3,), float(value))]
        assert table.stale(fresh) == [0]
        table.put(fresh, torch.tensor([float(value)]))
        assert table.row(fresh).tolist() == [float(value)]


def test_which_norms_were_found_by_a_link() -> None:
    """Those that were put as such, until somebody writes, or reads them."""
    memory = tensors(4)
    table = NormTable()
    assert not table.were_found(memory)
    table.put(memory, torch.arange(4.0), found=True)
    assert table.were_found(memory) and table.were_found([memory[3], memory[1]])
    memory[1].add_(1)
    assert not table.were_found(memory) and table.were_found([memory[3], memory[2]])
    table.put_some(memory, [1], torch.tensor([5.0]))
    assert not table.were_found([memory[1]]) and table.were_found([memory[0]])
    memory[1].add_(1)
    table.put(memory[1:2], torch.tensor([6.0]), found=True)
    assert table.were_found(memory) and table.row(memory).tolist() == [0.0, 6.0, 2.0, 3.0]
    assert not table.were_found([*memory, torch.ones(1)])


def test_a_row_that_nobody_has_is_written_to() -> None:
    """A new one is made only for the sake of who has the old one."""
    memory = tensors(4)
    table, row = NormTable(), torch.arange(4.0)
    table.put(memory, row)
    table.put(memory[1:2], torch.tensor([10.0]))
    assert table.row(memory) is row and row.tolist() == [0.0, 10.0, 2.0, 3.0]
    table.put(memory[1:2], torch.tensor([20.0]))
    assert row.tolist() == [0.0, 10.0, 2.0, 3.0] and table.row(memory).tolist() == [0.0, 20.0, 2.0, 3.0]


def test_products_are_taken_when_somebody_asks() -> None:
    """Once, for all or for some, and before anything else is put; the row that was multiplied stays as it is."""
    memory, factor = tensors(3), torch.tensor(2.0)
    for ask in (lambda table: table.row(memory[1:]), lambda table: table.put(memory[:1], torch.tensor([0.0]))):
        table = filled(memory)
        before = table.row(memory)
        table.put_product(memory, before, factor)
        ask(table)
        assert table.row(memory).tolist() == [0.0, 2.0, 4.0] and before.tolist() == [0.0, 1.0, 2.0]
        table.put_product(memory, table.row(memory), factor)
        table.put_product(memory, table.row(memory), factor)
        assert table.row(memory).tolist() == [0.0, 8.0, 16.0] and not table.were_found(memory)


def test_products_of_other_memory_are_taken_at_once() -> None:
    """Such as that of complex gradients, which is a new view each time."""
    memory, table = tensors(2), NormTable()
    table.put_product(memory, torch.tensor([1.0, 2.0]), torch.tensor(3.0))
    assert table.row(memory).tolist() == [3.0, 6.0]


def test_unsettled_norms_are_right_until_they_are_settled() -> None:
    """Before that no version is asked, so who puts them so must know that nobody writes; afterwards versions tell."""
    memory, other = tensors(3), torch.ones(5)
    table = NormTable()
    table.put(memory, torch.arange(3.0), found=True, settled=False)
    memory[0].add_(1)
    assert table.stale(memory) == [] and table.stale([other, memory[0]]) == [0] and table.were_found(memory)
    table.put([other], torch.tensor([7.0]), found=True)
    assert not table.settled and table.row([memory[2], other]).tolist() == [2.0, 7.0]
    table.settle()
    memory[1].add_(1)
    other.add_(1)
    assert table.settled and table.stale([*memory, other]) == [1, 3] and not table.were_found(memory)
