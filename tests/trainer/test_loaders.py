"""One loader or several become one stream that knows its end without reading further than it must."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from hookline.errors import TrainingError
from hookline.trainer.loaders import EpochBatches, epoch_length, named_loaders


class Endless:
    """A loader that does not know its length."""

    def __init__(self, count: int) -> None:
        self.count, self.read = count, 0

    def __iter__(self) -> Iterator[int]:
        for number in range(1, self.count + 1):
            self.read = number
            yield number


class Told:
    """Iterates over an epoch and writes down what was told: loader, batch, whether it is known to be the last."""

    def __init__(self, loaders: Any, limit: int | None = None, look_ahead: bool = False) -> None:
        self.where = (-1, "")
        self.batches = EpochBatches(loaders, limit, look_ahead, self.enter)

    def enter(self, index: int, name: str) -> None:
        self.where = (index, name)

    def all(self) -> list[tuple[int, str, Any, bool]]:
        return [(*self.where, batch, self.batches.last) for batch in self.batches]


@pytest.mark.parametrize(
    "loaders",
    [
        DataLoader([1, 2]),  # type: ignore[arg-type]
        [torch.ones(2), torch.ones(2)],
        [(torch.ones(2), torch.ones(2))],
        [{"input_ids": torch.ones(2)}],
        [[torch.ones(2), torch.ones(2)]],
    ],
    ids=["loader", "tensors", "tuples", "dicts", "lists"],
)
def test_one_loader_is_named_after_its_role(loaders: Any) -> None:
    """A DataLoader is one loader, and so is a plain list of batches of any kind."""
    assert list(named_loaders(loaders, "train")) == ["train"]


def test_several_loaders_are_named() -> None:
    """By key in a dict, by index in a list."""
    loader: Any = DataLoader([1, 2])  # type: ignore[arg-type]
    assert list(named_loaders({"small": loader, 7: loader}, "val")) == ["small", "7"]
    assert list(named_loaders([loader, loader], "val")) == ["0", "1"]
    assert named_loaders(None, "val") == {}


@pytest.mark.parametrize("loaders", [[], {"a": []}, DataLoader([])])  # type: ignore[arg-type]
def test_an_empty_loader_is_refused(loaders: Any) -> None:
    """Before anything runs, and by name."""
    with pytest.raises(TrainingError, match=r"train loader '(train|a)' is empty"):
        named_loaders(loaders, "train")


def test_what_cannot_be_iterated_is_refused() -> None:
    """A dataset's length, say, in the place of a loader."""
    with pytest.raises(TrainingError, match="val loader 'x' is a int"):
        named_loaders({"x": 3}, "val")


def test_the_length_of_an_epoch() -> None:
    """The sum of all lengths; unknown as soon as one is."""
    assert epoch_length({"a": [1, 2], "b": [3]}) == 3
    assert epoch_length({"a": [1, 2], "b": Endless(2)}) is None


def test_loader_after_loader() -> None:
    """Indices and names are told when the first batch of a loader comes."""
    told = [item[:3] for item in Told({"a": [1, 2], "b": [3]}).all()]
    assert told == [(0, "a", 1), (0, "a", 2), (1, "b", 3)]


def test_an_unknown_length_looks_ahead_only_if_asked() -> None:
    """Reading ahead would move the random streams of a dataset that draws."""
    assert [item[3] for item in Told({"a": Endless(3)}, look_ahead=True).all()] == [False, False, True]
    assert not any(item[3] for item in Told({"a": Endless(3)}).all())
    loader = Endless(3)
    next(iter(Told({"a": loader}).batches))
    assert loader.read == 1


@pytest.mark.parametrize(("limit", "length"), [(2, 2), (9, 3)])
def test_a_limit(limit: int, length: int) -> None:
    """A trial run takes the first few batches, and is content with fewer."""
    assert Told({"a": [1, 2, 3]}, limit).batches.length == length
    assert Told({"a": Endless(3)}, limit).batches.length == limit


def test_a_single_loader_is_iterated_over_as_it_is() -> None:
    """No frame of ours stands between it and the loop."""
    loader = [1, 2]
    assert type(iter(Told({"a": loader}).batches)) is type(iter(loader))


class Stream(IterableDataset[int]):
    """A dataset that does not know its length; a DataLoader's len() then raises."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_a_data_loader_without_a_length() -> None:
    """It is a loader like any other."""
    loaders = named_loaders(DataLoader(Stream(), batch_size=2), "train")
    assert epoch_length(loaders) is None
    assert [item[3] for item in Told(loaders, look_ahead=True).all()] == [False, True]


@pytest.mark.parametrize("look_ahead", [True, False])
def test_skipping(look_ahead: bool) -> None:
    """An epoch entered half-way goes on behind what was passed over; one that is over gives nothing more."""
    told = Told({"a": [1, 2], "b": [3, 4]}, look_ahead=look_ahead)
    told.batches.skip(3)
    assert [item[:3] for item in told.all()] == [(1, "b", 4)] and told.batches.given == 3
    streamed = Told({"a": Endless(2)}, look_ahead=look_ahead)
    streamed.batches.skip(2)
    assert streamed.all() == []
