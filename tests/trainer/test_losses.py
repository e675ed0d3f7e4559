"""The losses of an epoch are added up where they are and read only when asked for."""

import math

import pytest
import torch

from hookline.trainer.losses import LossBook


def test_the_mean_is_that_of_all_losses() -> None:
    """Folding now and then changes nothing about the mean."""
    book = LossBook()
    values = [float(value) for value in range(1000)]
    for index, value in enumerate(values):
        book.recent.append(torch.tensor(value))
        if index % 300 == 0:
            book.fold()
    assert book.mean() == pytest.approx(sum(values) / len(values))


def test_no_bit_tells_when_losses_were_folded() -> None:
    """On the host, the mean has the same bits whether losses were added to the sums often, once or at the end."""
    values = torch.rand(257, generator=torch.Generator().manual_seed(0)).unbind()
    means = []
    for often in (1, 10, 50, 1000):
        book = LossBook()
        for index, value in enumerate(values):
            book.recent.append(value)
            if index % often == 0:
                book.fold()
        means.append(book.mean())
    assert len(set(means)) == 1


def test_the_sums_go_on_in_another_process() -> None:
    """Saved in the middle of an epoch and put back, mean and bad losses are those of the whole epoch."""
    book, again = LossBook(), LossBook()
    book.recent += [torch.tensor(0.1), torch.tensor(float("inf")), torch.tensor(0.3)]
    again.load_state_dict(book.state_dict())
    for one in (book, again):
        one.recent.append(torch.tensor(0.7))
    assert again.state_dict() == book.state_dict()
    assert again.mean() == book.mean() and again.take_non_finite() == 1


def test_nothing_yet_is_nan() -> None:
    """Before the first batch the mean is nan, not an error and not zero."""
    assert math.isnan(LossBook().mean())


def test_non_finite_losses_are_told_once() -> None:
    """NaN and infinities are counted, and what was told is not told again."""
    book = LossBook()
    book.recent.extend(map(torch.tensor, [1.0, math.nan, math.inf, -math.inf]))
    assert book.take_non_finite() == 3
    assert book.take_non_finite() == 0
    book.recent.append(torch.tensor(math.nan))
    assert book.take_non_finite() == 1


def test_small_losses_are_added_in_double_precision() -> None:
    """A long epoch of half-precision losses keeps its mean."""
    book = LossBook()
    book.recent.extend([torch.tensor(0.1, dtype=torch.bfloat16)] * 5000)
    assert book.mean() == pytest.approx(float(torch.tensor(0.1, dtype=torch.bfloat16)))
