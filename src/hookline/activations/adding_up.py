"""How a graph that is being traced adds up statistics of a module's output by itself, with a kernel.

What a graph learns here from a place, it learns while it is traced and keeps for good, except for the tally: that is
a tensor, so that blocks of one class can share a graph. Whether somebody is due is a number on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from hookline.activations.operators import holder_of, operator
from hookline.activations.structure import flatten

SomeFunction = TypeVar("SomeFunction", bound=Callable[..., Any])

REFUSED, FIRST, LATER = "refused", "first", "later"  # what a graph is told that would add up an output


def fixed_while_tracing(function: SomeFunction) -> SomeFunction:
    """Let Dynamo call a method while it traces, with constants, and take what it returns for a constant.

    What ``torch.compiler.assume_constant_result`` does, which would import Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class Book(Protocol):
    """Who keeps tallies."""

    token: torch.Tensor  # stands for it in graphs
    due: torch.Tensor  # on the device: 1 if somebody is due, else 0

    def admit(self, device: torch.device) -> str:
        """Whether a graph may add up outputs on this device, and whether it asks for the first time."""

    def begin(self, due: torch.Tensor) -> None:
        """A graph begins to run: write into the tensor whether somebody is due."""


class Tallied:
    """A place whose statistics graphs can add up."""

    tally: torch.Tensor  # on the device
    ledger: Book | None  # keeps the tally

    @fixed_while_tracing
    def admit(self, device: torch.device) -> str:
        """What the ledger says to a graph that would add up an output on this device."""
        return self.ledger.admit(device) if self.ledger is not None else REFUSED

    @fixed_while_tracing
    def ledger_due(self) -> torch.Tensor:
        """The number that says whether somebody is due."""
        assert self.ledger is not None, "a graph was admitted by nobody"
        return self.ledger.due

    @fixed_while_tracing
    def ledger_token(self) -> torch.Tensor:
        """What stands for the ledger."""
        assert self.ledger is not None, "a graph was admitted by nobody"
        return self.ledger.token


def _begin(token: torch.Tensor, due: torch.Tensor) -> None:
    """Ask who is due, each time the graph runs and before its kernels do."""
    book = holder_of(token)
    if book is not None:
        book.begin(due)


begins = operator("begins(Tensor token, Tensor(a!) due) -> ()", _begin)


def adds_up(place: Tallied, output: Any) -> bool:
    """Have the graph add the first floating-point tensor of an output to the tally; False where no kernel can."""
    tensors: list[torch.Tensor] = []
    flatten(output, tensors, exact=False)
    for tensor in tensors:
        if tensor.is_floating_point():
            return type(tensor) is torch.Tensor and tensor.dtype.itemsize > 1 and _add(place, tensor)
    return False


def _add(place: Tallied, tensor: torch.Tensor) -> bool:
    answer = place.admit(tensor.device)
    if answer == REFUSED:
        return False
    if answer == FIRST:
        begins(place.ledger_token(), place.ledger_due())
    add_to_tally = torch.ops.hookline.add_to_tally.default  # there since the ledger was asked
    add_to_tally(tensor, place.tally, place.ledger_due())
    return True
