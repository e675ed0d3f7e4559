"""One loader or several become one stream that knows its end without reading further than it must."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hookline import get_trainer
from hookline.errors import CheckpointError, ConfigError, TrainingError
from hookline.trainer.data.epoch_batches import SequentialBatches
from hookline.trainer.data.loaders import TrainLoaders, epoch_length, named_loaders, trusted_length
from hookline.trainer.data.mixing import LoaderSchedule


class Endless:
    """A loader that does not know its length."""

    def __init__(self, count: int) -> None:
        self.count, self.read = count, 0

    def __iter__(self) -> Iterator[int]:
        for number in range(1, self.count + 1):
            self.read = number
            yield number


class Modest(Endless):
    """A loader that gives more than it says."""

    def __len__(self) -> int:
        return 2


class Told:
    """Iterates over an epoch and records loader, batch, and whether it is known to be the last."""

    def __init__(self, loaders: Any, limit: int | None = None, look_ahead: bool = False) -> None:
        self.where = (-1, "")
        self.batches = SequentialBatches(TrainLoaders(loaders, LoaderSchedule(), limit), look_ahead, self.enter)

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
def test_an_empty_loader_is_rejected(loaders: Any) -> None:
    """Before anything runs, and by name."""
    with pytest.raises(TrainingError, match=r"train loader '(train|a)' is empty"):
        named_loaders(loaders, "train")


@pytest.mark.parametrize("role", ["train", "val"])
def test_two_keys_of_one_text_are_rejected(role: str) -> None:
    """One of the two loaders would be lost."""
    with pytest.raises(ConfigError, match=f"{role} loaders: the keys 1 and '1' are the same string"):
        named_loaders({1: [torch.ones(2)], "1": [torch.ones(2)]}, role)


def test_what_cannot_be_iterated_is_rejected() -> None:
    """A dataset's length, say, in the place of a loader."""
    with pytest.raises(TrainingError, match="val loader 'x' is a int"):
        named_loaders({"x": 3}, "val")


def test_the_length_of_an_epoch() -> None:
    """The sum of all lengths; unknown as soon as one is."""
    assert epoch_length(TrainLoaders({"a": [1, 2], "b": [3]}, LoaderSchedule())) == 3
    assert epoch_length(TrainLoaders({"a": [1, 2], "b": Endless(2)}, LoaderSchedule())) is None


def test_a_length_that_is_not_implemented() -> None:
    """It is not known, as if the method were not there."""

    class Silent(Endless):
        def __len__(self) -> int:
            raise NotImplementedError

    assert epoch_length(TrainLoaders({"a": Silent(2)}, LoaderSchedule())) is None


def test_loader_after_loader() -> None:
    """Index and name of a loader are reported with its first batch."""
    told = [item[:3] for item in Told({"a": [1, 2], "b": [3]}).all()]
    assert told == [(0, "a", 1), (0, "a", 2), (1, "b", 3)]


def test_an_unknown_length_looks_ahead_only_if_asked() -> None:
    """Reading ahead would move the random streams of a dataset that draws."""
    assert [item[3] for item in Told({"a": Endless(3)}, look_ahead=True).all()] == [False, False, True]
    assert not any(item[3] for item in Told({"a": Endless(3)}).all())
    loader = Endless(3)
    next(iter(Told({"a": loader}).batches))
    assert loader.read == 1


@pytest.mark.parametrize("look_ahead", [True, False])
def test_a_promised_length_is_not_the_end(look_ahead: bool) -> None:
    """What comes beyond it is read, and so are the loaders behind; the last one is known in time."""
    assert [item[2:] for item in Told({"a": Modest(4)}, look_ahead=look_ahead).all()] == [
        (1, False), (2, False), (3, False), (4, True),
    ]  # fmt: skip
    told = Told({"a": Modest(4), "b": [7, 8]}, look_ahead=look_ahead)
    assert told.all() == [
        (0, "a", 1, False), (0, "a", 2, False), (0, "a", 3, False), (0, "a", 4, False),
        (1, "b", 7, False), (1, "b", 8, True),
    ]  # fmt: skip
    assert Told({"a": Modest(2)}, look_ahead=look_ahead).all()[-1][3]  # a promise that is kept
    assert len(Told({"a": Modest(1)}, look_ahead=look_ahead).all()) == 1


def test_a_promise_is_believed_until_its_last_batch() -> None:
    """Nothing is read ahead before that, nor for a limit that comes first."""
    loader = Modest(4)
    batches = iter(Told({"a": loader}).batches)
    assert (next(batches), loader.read) == (1, 1)
    assert (next(batches), loader.read) == (2, 3)
    batches = iter(Told({"a": loader}, limit=2).batches)
    assert (next(batches), next(batches), loader.read) == (1, 2, 2)


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 4), (2, 2)])
def test_a_sampler_whose_length_is_too_small(accumulate: int, steps: int) -> None:
    """A DataLoader with batches of one's own trains on all of them, in every epoch."""

    class Batches(Sampler[list[int]]):
        def __len__(self) -> int:
            return 1

        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0, 1], [2], [3, 4], [5]])

    data = torch.arange(6.0).reshape(-1, 1)
    loader: Any = DataLoader(torch.utils.data.TensorDataset(data, data), batch_sampler=Batches())
    assert seen_by(loader, accumulate=accumulate, max_epochs=None, max_steps=2 * steps) == [[0, 2, 3, 5]] * 2


class Twice(DataLoader[Any]):
    """A DataLoader that was given another way to iterate."""

    def __iter__(self) -> Any:
        return (batch for _ in range(2) for batch in list(DataLoader(self.dataset)))


def test_whose_length_is_certain() -> None:
    """Lists, and DataLoaders as torch made them whose samplers count."""
    data: Any = [1, 2, 3]
    certain: list[Any] = [
        data,
        DataLoader(data),
        DataLoader(data, shuffle=True, batch_size=None),
        DataLoader(data, sampler=SubsetRandomSampler([0, 2])),
        DataLoader(data, sampler=WeightedRandomSampler([1, 2, 3], 2)),
        DataLoader(data, sampler=DistributedSampler(data, 2, 0)),
    ]
    for loader in certain:
        assert (
            trusted_length(loader) is not None and len(Told({"a": loader}).all()) == Told({"a": loader}).batches.length
        )
    assert trusted_length(Twice(data)) is None and len(Told({"a": Twice(data)}).all()) == 6


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
    assert epoch_length(TrainLoaders(loaders, LoaderSchedule())) is None
    assert [item[3] for item in Told(loaders, look_ahead=True).all()] == [False, True]


@pytest.mark.parametrize("look_ahead", [True, False])
@pytest.mark.parametrize("count", range(5))
@pytest.mark.parametrize("first", [Endless(2), [1, 2], Modest(2)], ids=["unknown", "list", "promised"])
def test_an_epoch_is_resumed_anywhere(first: Any, look_ahead: bool, count: int) -> None:
    """The position after any batch leads to the rest of them, each under its own loader's name."""
    loaders = {"a": first, "b": [3, 4]}
    told = Told(loaders, look_ahead=look_ahead)
    for _ in range(count):
        next(iter(told.batches))
    told.batches.start() if count == 0 else None
    again = Told(loaders, look_ahead=look_ahead)
    again.batches.resume(told.batches.position, count)
    expected = [(0, "a", 1), (0, "a", 2), (1, "b", 3), (1, "b", 4)]
    assert [item[:3] for item in again.all()] == expected[count:] and again.batches.offset == count


def test_a_missing_loader() -> None:
    """A run that was inside a loader cannot resume without it."""
    told = Told({"a": [1, 2], "b": [3]})
    next(iter(told.batches))
    with pytest.raises(CheckpointError, match="inside the loader 'a'; now there are b, c"):
        Told({"b": [3], "c": [4]}).batches.resume(told.batches.position, 1)


def test_the_rest_of_an_epoch_is_what_the_loaders_have_now() -> None:
    """A loader that was read to its end may have another length now; the current one is read to its end."""
    told = Told({"a": [1, 2, 3, 4], "b": [5, 6, 7]})
    batches = iter(told.batches)
    for _ in range(5):
        next(batches)
    again = Told({"a": [1], "b": [5, 6, 7]}).batches
    again.resume(told.batches.position, 5)
    assert again.length == 7 and list(again) == [6, 7]


def test_a_loader_with_a_state_is_saved_also_when_the_epoch_was_resumed_after_it() -> None:
    """It is still the one that begins the next epoch."""

    class Stateful(Endless):
        def state_dict(self) -> dict[str, int]:
            return {"read": self.read}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.read = state["read"]

    told = Told({"a": Stateful(2), "b": [5, 6, 7]})
    batches = iter(told.batches)
    for _ in range(3):
        next(batches)
    again = Told({"a": Stateful(2), "b": [5, 6, 7]}).batches
    again.resume(told.batches.position, 3)
    assert list(again) == [6, 7] and list(again.end_states()) == ["a"]


def seen_by(loaders: Any, **options: Any) -> list[list[float]]:
    """What a run trains on: the first number of every batch, by epoch."""
    model = torch.nn.Linear(1, 1)
    options = {"record": False, "console": False, "loss_fn": torch.nn.functional.mse_loss, "max_epochs": 3, **options}
    trainer = get_trainer("simple", model, loaders, torch.optim.SGD(model.parameters(), 0.0), "cpu", **options)
    seen: list[list[float]] = []
    trainer.on("epoch_start", name="new epoch")(lambda: seen.append([]))
    trainer.on("train_batch_start", name="eye")(lambda batch: seen[-1].append(batch[0].reshape(-1)[0].item()))
    expected = trainer.total_steps
    trainer.train()
    assert expected is None or expected == trainer.step
    return seen


def numbered(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.full((1, 1), float(number)), torch.zeros(1, 1)) for number in range(count)]


@pytest.mark.parametrize(
    ("limit", "accumulate", "expected"),
    [
        (3, 1, [0, 1, 2]),
        (0.25, 1, [0, 1]),
        (1.0, 1, list(range(8))),
        (0.01, 1, [0]),
        (99, 1, list(range(8))),
        (3, 2, [0, 1, 2]),
    ],
)
def test_an_epoch_can_be_cut_short(limit: Any, accumulate: int, expected: list[int]) -> None:
    """After a number of batches, or a share of them; every epoch alike, its last window short if need be."""
    assert seen_by(numbered(8), limit_train_batches=limit, accumulate=accumulate) == [expected] * 3


def test_the_limit_is_the_epoch_s_not_the_loader_s() -> None:
    """Several loaders one after the other: the epoch ends inside the one where the limit is reached."""
    loaders = {"a": numbered(2), "b": numbered(4)}
    assert seen_by(loaders, limit_train_batches=3, max_epochs=2) == [[0, 1, 0]] * 2


def test_a_loader_without_a_length_can_be_limited_by_a_count_only() -> None:
    """A share of something unknown is refused with the remedy."""

    class Unknown:
        def __iter__(self) -> Iterator[Any]:
            return iter(numbered(50))

    assert seen_by(Unknown(), limit_train_batches=2, max_epochs=2) == [[0, 1]] * 2
    with pytest.raises(TrainingError, match=r"limit_train_batches=0\.5: the length of a loader is unknown"):
        seen_by(Unknown(), limit_train_batches=0.5)


def shuffled() -> Any:
    """A DataLoader that draws its order from training's random stream."""
    data = torch.arange(32.0).reshape(-1, 1)
    return DataLoader(torch.utils.data.TensorDataset(data, data), batch_size=1, shuffle=True)


def test_overfitting_sees_the_same_batches_in_every_epoch_and_attempt() -> None:
    """Also with a loader that shuffles, and whatever the random streams were; another seed takes others."""
    torch.manual_seed(1)
    first = seen_by(shuffled(), overfit_batches=4)
    torch.manual_seed(2)
    assert seen_by(shuffled(), overfit_batches=4) == first
    assert first[0] == first[1] == first[2] and len(set(first[0])) == 4
    assert seen_by(shuffled(), overfit_batches=4, seed=9)[0] != first[0]


def test_overfitting_limits_each_loader_and_of_the_validation() -> None:
    """A loader that has fewer gives what it has; validation is as short, or it would take longer than training."""
    validated: list[int] = []
    model = torch.nn.Linear(1, 1)
    loaders, optimizer = {"a": numbered(2), "b": numbered(9)}, torch.optim.SGD(model.parameters(), 0.0)
    options: dict[str, Any] = {"loss_fn": torch.nn.functional.mse_loss, "record": False, "console": False}
    trainer = get_trainer(
        "simple", model, loaders, optimizer, "cpu", val_dataloader=numbered(9), overfit_batches=3, **options
    )
    trainer.on("validation_batch_start", name="eye")(lambda batch_idx: validated.append(batch_idx))
    assert trainer.total_steps == 5
    trainer.train()
    assert trainer.step == 5 and validated == [0, 1, 2]
