"""What a graph is told that would add up a module's output; that it does is shown in test_ledger."""

import torch

from hookline.activations.adding_up import REFUSED, Tallied, adds_up


class Bare(Tallied):
    """A place that no ledger serves."""

    tally = torch.empty(0)
    ledger = None


def test_without_a_ledger_nothing_is_added_up() -> None:
    """The graph shows the output to the hooks instead."""
    assert Bare().admit(torch.device("cpu")) == REFUSED
    assert not adds_up(Bare(), torch.ones(2))


def test_what_no_kernel_can_read_is_not_added_up() -> None:
    """Integers, eight-bit numbers, an output without tensors: a ledger is not even asked."""

    class Asked(Bare):
        def admit(self, device: torch.device) -> str:
            raise AssertionError("asked")

    for output in (torch.ones(2).long(), torch.ones(2).to(torch.float8_e4m3fn), None, (torch.tensor([1]), "text")):
        assert not adds_up(Asked(), output)
