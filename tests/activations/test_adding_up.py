"""What a graph is told that would add up a module's output; that it does is shown in test_ledger."""

from typing import Any

import torch

from hookline.activations import adding_up
from hookline.activations.adding_up import REFUSED, Tallied, adds_up, close_book, entitled, open_book


class Refusing:
    """A book that counts how often it is asked, and admits nobody."""

    token = due = torch.empty(0)
    asked = 0

    def admit(self, device: torch.device) -> str:
        self.asked += 1
        return REFUSED

    def is_of_whole_model(self) -> bool:
        return False

    def edition(self) -> str:
        return "as ever"

    def look_at_edition(self) -> bool:
        return False

    def begin(self, due: torch.Tensor) -> None: ...


def test_without_a_book_nothing_is_added_up() -> None:
    """The graph shows the output to the hooks instead; so it does once the book is closed."""
    book = Refusing()
    assert not adds_up(Tallied(), "in a test", "", torch.ones(2))
    open_book("in a test", book)
    assert not adds_up(Tallied(), "in a test", "", torch.ones(2)) and book.asked == 1
    close_book("in a test")
    assert not adds_up(Tallied(), "in a test", "", torch.ones(2)) and book.asked == 1


def test_what_no_kernel_can_read_is_not_added_up() -> None:
    """Integers, eight-bit numbers, an output without tensors: a book is not even asked."""
    book = Refusing()
    open_book("in a test", book)
    outputs: list[Any] = [
        torch.ones(2).long(),
        torch.ones(2).to(torch.float8_e4m3fn),
        None,
        (torch.tensor([1]), "text"),
    ]
    for output in outputs:
        assert not adds_up(Tallied(), "in a test", "", output)
    assert not book.asked


def test_titles_are_never_given_twice_and_keep_nobody_alive() -> None:
    """A graph that was made for a place that is gone must not serve another."""
    place = Tallied()
    title = entitled(place)
    assert adding_up._places[title] is place and entitled(place) != title
    adding_up.forget_title(title)
    assert title not in adding_up._places
    title = entitled(place)
    del place
    assert title not in adding_up._places


def test_an_edition_is_kept_for_each_open_book() -> None:
    """Made anew when asked for, and gone with the book."""
    book = Refusing()
    open_book("in a test", book)
    adding_up.renew_editions()
    assert adding_up._editions["in a test"] == "as ever"
    close_book("in a test")
    adding_up.renew_editions()
    assert "in a test" not in adding_up._editions
