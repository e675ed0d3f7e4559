"""How a graph that is being traced adds up statistics of a module's output by itself, with a kernel.

What a graph learns here from a place, it learns while it is traced and keeps for good. Where blocks of one class
share a graph, the tally must be an exception: it is a tensor that comes with each run, at 5 µs for each module. A graph
of the whole model has no such use for it, and is tied to its places instead. Whether somebody is due is a number on the
device.

The operators write into that number, if one believes what they say of themselves, and into nothing else. That keeps
them in their order and in the graph. That it is the tallies that are written to, nobody else in the graph can notice;
each input that a graph writes to costs it 4 µs a run.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from hookline.activations.operators import holder_of, operator
from hookline.activations.structure import flatten

SomeFunction = TypeVar("SomeFunction", bound=Callable[..., Any])

REFUSED, FIRST, LATER = "refused", "first", "later"  # what a graph is told that would add up an output


def fixed_while_tracing(function: SomeFunction) -> SomeFunction:
    """Let Dynamo call a function while it traces, with constants, and take what it returns for a constant.

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

    def is_of_whole_model(self) -> bool:
        """Whether the graph that is being traced begins with the model itself."""

    def edition(self) -> str:
        """Which torch hooks of ours the model has."""

    def look_at_edition(self) -> bool:
        """Have that graph look at its edition instead of hook dictionaries, if it is of the whole model."""

    def begin(self, due: torch.Tensor) -> None:
        """A graph begins to run: write into the tensor whether somebody is due."""


class Tallied:
    """A place whose statistics graphs can add up."""

    tally: torch.Tensor  # on the device: one row
    home: tuple[torch.Tensor, int]  # the table that it is a row of, and which


# ---- while a graph is traced: it asks by texts, as to look at a text before each run costs it least ------------------

_books: weakref.WeakValueDictionary[str, Book] = weakref.WeakValueDictionary()  # by what hooks want that they serve
_places: weakref.WeakValueDictionary[str, Tallied] = weakref.WeakValueDictionary()  # by their titles
_editions: dict[str, str] = {}  # by what hooks want: which torch hooks of ours the model has
_titles = itertools.count()


def open_book(wants: str, book: Book) -> None:
    """Have graphs whose hooks want this ask a book."""
    _books[wants] = book
    _editions.setdefault(wants, "")


def close_book(wants: str) -> None:
    """The text leads nowhere from now on."""
    _books.pop(wants, None)
    _editions.pop(wants, None)


def renew_editions() -> None:
    """Torch hooks of ours have come or gone: graphs that were made with others do not fit until those are back."""
    for wants in list(_editions):
        book = _books.get(wants)
        if book is None:
            del _editions[wants]
        else:
            _editions[wants] = book.edition()


def entitled(place: Tallied) -> str:
    """A title for a place that no other has or had."""
    title = f"tally {next(_titles)}"
    _places[title] = place
    return title


def forget_title(title: str) -> None:
    """No graph that is made from now on asks for it."""
    _places.pop(title, None)


@fixed_while_tracing
def _admitted(wants: str, device: torch.device) -> str:
    book = _books.get(wants)
    return REFUSED if book is None else book.admit(device)


@fixed_while_tracing
def _is_of_whole_model(wants: str) -> bool:
    return _books[wants].is_of_whole_model()


@fixed_while_tracing
def _looks_at(wants: str, edition: str) -> bool:
    return _books[wants].look_at_edition()


@fixed_while_tracing
def _due(wants: str) -> torch.Tensor:
    return _books[wants].due


@fixed_while_tracing
def _token(wants: str) -> torch.Tensor:
    return _books[wants].token


@fixed_while_tracing
def _table(title: str) -> torch.Tensor:
    return _places[title].home[0]


@fixed_while_tracing
def _row(title: str) -> int:
    return _places[title].home[1]


# ---- in the graph ----------------------------------------------------------------------------------------------------


def _begin(token: torch.Tensor, due: torch.Tensor) -> None:
    """Ask who is due, each time the graph runs and before its kernels do."""
    book = holder_of(token)
    if book is not None:
        book.begin(due)


begins = operator("begins(Tensor token, Tensor(a!) due) -> ()", _begin)


def _add_to_tallies(
    tensors: list[torch.Tensor], tables: list[torch.Tensor], rows: list[int], due: torch.Tensor
) -> None:
    """Queue the kernels, which a CUDA graph can repeat. A table that all tallies are in need stand there but once."""
    from hookline.stats.cuda_tally import add  # only now: it imports Triton

    add(tensors, tables, rows, due)


# The order of elements in memory does not matter, so the compiler shall not change it for this operator's sake.
adds = operator(
    "add_to_tallies(Tensor[] tensors, Tensor[] tables, int[] rows, Tensor(a!) due) -> ()",
    _add_to_tallies,
    tag=torch.Tag.flexible_layout,
)


def adds_up(place: Tallied, wants: str, title: str, output: Any) -> bool:
    """Have the graph add the first floating-point tensor of an output to the tally; False where no kernel can.

    Whatever is looked at here is looked at before each run, too, and the title ties the graph to one place; a graph of
    the whole model looks at its edition instead.
    """
    tensors: list[torch.Tensor] = []
    flatten(output, tensors, exact=False)
    for tensor in tensors:
        if tensor.is_floating_point():
            readable = type(tensor) is torch.Tensor and tensor.dtype.itemsize > 1
            return readable and _add(place, wants, title, tensor)
    return False


def _add(place: Tallied, wants: str, title: str, tensor: torch.Tensor) -> bool:
    answer = _admitted(wants, tensor.device)
    if answer == REFUSED:
        return False
    if answer == FIRST:
        begins(_token(wants), _due(wants))
        _looks_at(wants, _editions[wants])  # read here, the text is looked at before each run
    if _is_of_whole_model(wants):
        adds([tensor], [_table(title)], [_row(title)], _due(wants))
    else:
        adds([tensor], [place.tally], [0], _due(wants))
    return True
