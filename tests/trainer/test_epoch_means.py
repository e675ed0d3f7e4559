"""What an epoch has beside its losses is averaged where it is, and goes on in another process."""

import pytest
import torch

from hookline.trainer.epoch_means import EpochMeans, epoch_name
from hookline.trainer.losses import LossBook


def test_numbers_of_any_kind_are_averaged() -> None:
    """Over those that came, folded or not."""
    means = EpochMeans()
    for value in (torch.tensor(1.0), 2, torch.tensor([3]), True):
        means.add("train/acc", value)
        means.fold()
    means.add("train/a/loss", torch.tensor(0.5, dtype=torch.bfloat16))
    assert means.means() == {"train/epoch_acc": 1.75, "train/a/epoch_loss": 0.5}


def test_on_a_device_they_are_added_there() -> None:
    """A device without memory stands for one: to read it would be an error."""
    means = EpochMeans()
    for _ in range(2):
        means.add("train/acc", torch.ones((), device="meta"))
    means.fold()
    with pytest.raises(RuntimeError):
        means.means()


def test_the_newest_may_be_asked_for_from_a_step_on() -> None:
    """Older ones are left out."""
    means = EpochMeans()
    means.note(1, "a", torch.tensor(1.0))
    means.note(2, "a", torch.tensor(2.0))
    means.note(1, "b", 3)
    assert (means.newest(-1), means.newest(1), means.newest(2)) == ({"a": 2.0, "b": 3.0}, {"a": 2.0}, {})


def test_the_newest_stay_when_an_epoch_ends() -> None:
    """Means begin anew; without a step, only those of the epoch are given."""
    means = EpochMeans()
    means.add("train/a/loss", 1.0)
    means.note(7, "train/a/loss", 1.0)
    following = EpochMeans()
    following.load_state_dict(means.of_next_epoch(7).state_dict())
    assert following.means() == following.newest() == {} and following.newest(6) == {"train/a/loss": 1.0}


def test_a_book_of_losses_saves_them_too() -> None:
    """One of an earlier version knows nothing of them."""
    book, again = LossBook(), LossBook()
    book.beside.add("train/acc", 0.25)
    book.beside.note(4, "train/acc", 0.25)
    again.load_state_dict(book.state_dict())
    again.beside.add("train/acc", 0.75)
    assert again.beside.means() == {"train/epoch_acc": 0.5} and again.beside.newest(3) == {"train/acc": 0.25}
    again.load_state_dict({"count": 0, "sum": 0.0, "bad": 0})
    assert again.beside.means() == again.beside.newest(-1) == {}


def test_the_mean_is_named_after_the_number() -> None:
    """The last part of the name says what it is."""
    assert epoch_name("train/acc") == "train/epoch_acc" and epoch_name("train/a/loss") == "train/a/epoch_loss"
