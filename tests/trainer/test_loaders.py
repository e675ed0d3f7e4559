"""One loader or several become one stream that knows its end without reading further than it must."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import make_trainer
from read_batches import ONE_WINDOW, Modest, Reader, Unknown, make_reader
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hookline.checkpoints.store import read_checkpoint
from hookline.errors import CheckpointError, ConfigError, TrainingError


@pytest.mark.parametrize(
    "loaders",
    [
        DataLoader([1, 2]),
        [torch.ones(2), torch.ones(2)],
        [(torch.ones(2), torch.ones(2))],
        [{"input_ids": torch.ones(2)}],
        [[torch.ones(2), torch.ones(2)]],
    ],
    ids=["loader", "tensors", "tuples", "dicts", "lists"],
)
def test_one_loader_is_named_after_its_role(loaders: Any) -> None:
    """A DataLoader is one loader, and so is a plain list of batches of any kind."""
    assert Reader(loaders, max_steps=1).loaders == [(0, "train")]


def test_several_loaders_are_named() -> None:
    """By key in a dict, by index in a list."""
    loader: Any = DataLoader([1, 2])
    assert list(make_reader(None, val_loaders={"small": loader, 7: loader}).val_loaders) == ["small", "7"]
    assert Reader([loader, loader]).loaders == [(0, "0")] * 2 + [(1, "1")] * 2


@pytest.mark.parametrize("loaders", [[], {"a": []}, DataLoader([])], ids=["list", "dict", "loader"])
def test_an_empty_loader_is_rejected(loaders: Any) -> None:
    """Before anything runs, and by name."""
    with pytest.raises(TrainingError, match=r"train loader '(train|a)' is empty"):
        make_reader(loaders)


@pytest.mark.parametrize("role", ["train", "val"])
def test_two_keys_of_one_text_are_rejected(role: str) -> None:
    """One of the two loaders would be lost."""
    loaders = {1: [torch.ones(2)], "1": [torch.ones(2)]}
    with pytest.raises(ConfigError, match=f"{role} loaders: the keys 1 and '1' are the same string"):
        make_reader(loaders) if role == "train" else make_reader(None, val_loaders=loaders)


def test_what_cannot_be_iterated_is_rejected() -> None:
    """A dataset's length, say, in the place of a loader."""
    with pytest.raises(TrainingError, match="val loader 'x' is an int"):
        make_reader(None, val_loaders={"x": 3})


def test_a_length_that_is_not_implemented() -> None:
    """It is not known, as if the method were not there."""

    class Silent(Unknown):
        def __len__(self) -> int:
            raise NotImplementedError

    read = Reader(Silent([1, 2]), accumulate=ONE_WINDOW)
    assert read.trainer.total_steps is None and read.ends == [2]


@pytest.mark.parametrize("schedule", ["sequential", "round_robin"])
def test_loader_after_loader(schedule: str) -> None:
    """Index and name are those of the batch; one loader alone is read as it is, whatever the schedule."""
    read = Reader({"a": [1, 2], "b": [3]})
    assert (read.batches, read.loaders) == ([1, 2, 3], [(0, "a"), (0, "a"), (1, "b")])
    read = Reader({"a": [1, 2]}, loader_schedule=schedule, accumulate=ONE_WINDOW)
    assert (read.batches, read.loaders, read.ends) == ([1, 2], [(0, "a")] * 2, [2])


def read_at_each_batch(loader: Any, **options: Any) -> list[int]:
    """Return how many batches of a loader had been read at each batch that was trained on."""
    trainer, read = make_reader({"a": loader}, **options), list[int]()
    trainer.on("train_batch_end")(lambda: read.append(loader.read))
    trainer.train()
    return read


def test_a_batch_is_read_before_its_turn_only_within_a_window() -> None:
    """After the backward pass, to know whether the window is the epoch's last; a plain loop reads it there, too."""
    assert read_at_each_batch(Unknown([1, 2, 3])) == [1, 2, 3]
    assert read_at_each_batch(Unknown([1, 2, 3]), accumulate=2) == [2, 2, 3]
    assert Reader(Unknown([1, 2, 3]), accumulate=2).ends == [2, 3]
    assert read_at_each_batch(Modest([1, 2, 3, 4])) == [1, 2, 3, 4]
    assert read_at_each_batch(Modest([1, 2, 3, 4]), limit_train_batches=2) == [1, 2]


@pytest.mark.parametrize("accumulate", [1, ONE_WINDOW])
def test_a_promised_length_is_not_the_end(accumulate: int) -> None:
    """What comes beyond it is read, and so are the loaders behind; the last one is known in time."""
    read = Reader(Modest([1, 2, 3, 4]), accumulate=accumulate)
    assert read.batches == [1, 2, 3, 4] and read.ends[-1] == 4
    read = Reader({"a": Modest([1, 2, 3, 4]), "b": [7, 8]}, accumulate=accumulate)
    assert read.batches == [1, 2, 3, 4, 7, 8] and read.ends[-1] == 6
    assert read.loaders == [(0, "a")] * 4 + [(1, "b")] * 2
    assert Reader(Modest([1, 2]), accumulate=accumulate).ends[-1] == 2  # a promise that is kept
    assert Reader(Modest([1]), accumulate=accumulate).batches == [1]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("items", "ended"), [([1, 2], 1), ([1, 2, 3, 4], 0)], ids=str)
def test_a_run_that_stops_where_its_length_ends(items: list[int], ended: int, accumulate: int, tmp_path: Path) -> None:
    """The epoch is over if the loader has no more, and not if it has: a resumed run reads the rest."""
    options = {"max_epochs": None, "accumulate": accumulate}
    trainer, ends = make_reader(Modest(items), record=True, output_dir=str(tmp_path), **options), list[int]()
    trainer.on("epoch_end", name="end")(lambda epoch: ends.append(epoch))
    trainer.on("train_end", name="save")(lambda trainer: trainer.save())
    trainer.fit(max_steps=2 // accumulate)
    assert len(ends) == ended
    rest = Reader(Modest(items), resume=SimpleNamespace(trainer=trainer), max_steps=4 // accumulate, **options)
    assert rest.batches == [*items, *items][2:4]


class Draws(IterableDataset[torch.Tensor]):
    """A stream that draws its samples when they are read, with a length or without."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(12):
            yield torch.randn(3)


class DrawsKnown(Draws):
    def __len__(self) -> int:
        return 12


class DrawsIndices(Sampler[int]):
    """A sampler that draws each index when it is asked for."""

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(8, ())) for _ in range(12))


class DrawingLoader:
    """A loader that also draws when it has no more."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(6):
            yield torch.randn(2, 3)
        torch.randn(5)


DRAWING: dict[str, Any] = {
    "stream": lambda: DataLoader(Draws(), batch_size=2),
    "stream with a length": lambda: DataLoader(DrawsKnown(), batch_size=2),
    "sampler": lambda: DataLoader(torch.arange(24.0).reshape(8, 3), batch_size=2, sampler=DrawsIndices()),
    "loader": lambda: DrawingLoader(),
    "shuffled": lambda: DataLoader(torch.arange(36.0).reshape(12, 3), batch_size=2, shuffle=True),
}


def dropout_loss(model: Any, batch: Any) -> torch.Tensor:
    """Draw random numbers in the forward pass."""
    return (torch.nn.functional.dropout(model(batch / 10), 0.4) + torch.randn(1)).square().mean()


class NoisySGD(torch.optim.SGD):
    """An optimizer that draws."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.add_(torch.randn_like(param), alpha=0.1)
        return super().step(closure)


def plain_loop(loader: Any, accumulate: int, epochs: int) -> list[float]:
    """Train with a loop as it is written without us, and return the losses."""
    torch.manual_seed(5)
    model = torch.nn.Linear(3, 1)
    optimizer, losses = NoisySGD(model.parameters(), 0.05), list[float]()
    for _ in range(epochs):
        pending = 0
        for batch in loader:
            loss = dropout_loss(model, batch)
            (loss / accumulate).backward()
            losses.append(loss.item())
            pending += 1
            if pending == accumulate:
                optimizer.step()
                optimizer.zero_grad()
                pending = 0
        if pending:
            for param in model.parameters():
                param.grad.mul_(accumulate / pending)
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("kind", DRAWING)
def test_random_numbers_are_drawn_in_the_order_of_a_plain_loop(kind: str, accumulate: int) -> None:
    """Datasets, samplers, dropout and an optimizer draw from one stream: any batch read early would show."""
    expected = plain_loop(DRAWING[kind](), accumulate, epochs=3)
    options = {"loss_fn": None, "step_fn": dropout_loss, "accumulate": accumulate, "max_epochs": 3}
    torch.manual_seed(5)
    trainer = make_trainer(
        model=torch.nn.Linear(3, 1), data=DRAWING[kind](), optimizer=partial(NoisySGD, lr=0.05), **options
    )
    losses: list[float] = []
    trainer.on("train_batch_end", name="losses")(lambda loss: losses.append(loss))
    trainer.on("train_batch_end", name="draws")(lambda: torch.rand(3))
    trainer.train()
    assert losses == pytest.approx(expected, rel=1e-5)


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


class Watched(list[int]):
    """A dataset that counts what is read of it."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        self.read += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("make", "length"),
    [
        (lambda data: DataLoader(data), 3),
        (lambda data: DataLoader(data, shuffle=True, batch_size=None), 3),
        (lambda data: DataLoader(data, sampler=SubsetRandomSampler([0, 2])), 2),
        (lambda data: DataLoader(data, sampler=WeightedRandomSampler([1, 2, 3], 2)), 2),
        (lambda data: DataLoader(data, sampler=DistributedSampler(data, 2, 0)), 2),
        (lambda data: Twice(data), 6),
    ],
    ids=["plain", "shuffled", "subset", "weighted", "distributed", "another iterator"],
)
def test_whose_length_is_certain(make: Any, length: int) -> None:
    """DataLoaders as torch made them whose samplers count are not read ahead, but the last batch is known in time."""
    data = Watched([1, 2, 3])
    trainer, read, ends = make_reader(make(data), accumulate=ONE_WINDOW), list[int](), list[int]()
    trainer.on("train_batch_end", name="read")(lambda: read.append(data.read))
    trainer.on("step_end", name="end")(lambda batch_idx: ends.append(batch_idx + 1))
    trainer.train()
    assert ends == [length]
    assert read == (list(range(1, length + 1)) if length < 6 else [3, 3, 6, 6, 6, 6])


@pytest.mark.parametrize("kind", [list, Unknown])
@pytest.mark.parametrize(("limit", "length"), [(2, 2), (9, 3)])
def test_a_limit(kind: type, limit: int, length: int) -> None:
    """A trial run takes the first few batches, and is content with fewer."""
    read = Reader({"a": kind([1, 2, 3])}, limit_train_batches=limit, accumulate=ONE_WINDOW)
    assert read.batches == [1, 2, 3][:length] and read.ends == [length]


class Stream(IterableDataset[int]):
    """A dataset that does not know its length; a DataLoader's len() then raises."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_a_data_loader_without_a_length() -> None:
    """It is a loader like any other."""
    read = Reader(DataLoader(Stream(), batch_size=2), accumulate=ONE_WINDOW)
    assert read.trainer.total_steps is None and read.ends == [2]


@pytest.mark.parametrize(("accumulate", "count"), [(1, 1), (1, 2), (1, 3), (2, 2)])
@pytest.mark.parametrize("kind", [Unknown, list, Modest], ids=["unknown", "list", "promised"])
def test_an_epoch_is_resumed_anywhere(kind: type, accumulate: int, count: int, tmp_path: Path) -> None:
    """The position after any batch leads to the rest of them, each under its own loader's name."""
    options = {"accumulate": accumulate, "max_epochs": 2}
    read = Reader({"a": kind([1, 2]), "b": [3, 4]}, count, root=tmp_path, **options)
    again = Reader({"a": kind([1, 2]), "b": [3, 4]}, resume=read, **options)
    assert read.batches + again.batches == [1, 2, 3, 4] * 2
    assert read.loaders + again.loaders == [(0, "a"), (0, "a"), (1, "b"), (1, "b")] * 2


def test_a_missing_loader(tmp_path: Path) -> None:
    """A run that was inside a loader cannot resume without it."""
    read = Reader({"a": [1, 2], "b": [3]}, 1, root=tmp_path)
    with pytest.raises(CheckpointError, match="inside the loader 'a'; now there are b, c"):
        Reader({"b": [3], "c": [4]}, resume=read)


def test_the_rest_of_an_epoch_is_what_the_loaders_have_now(tmp_path: Path) -> None:
    """A loader that was read to its end may have another length now; the current one is read to its end."""
    read = Reader({"a": [1, 2, 3, 4], "b": [5, 6, 7]}, 5, root=tmp_path)
    assert Reader({"a": [1], "b": [5, 6, 7]}, resume=read).batches == [6, 7]


class Stateful(Unknown):
    """A loader with a state."""

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


def test_a_loader_with_a_state_is_saved_also_when_the_epoch_was_resumed_after_it(tmp_path: Path) -> None:
    """It is still the one that begins the next epoch."""
    read = Reader({"a": Stateful([1, 2]), "b": [5, 6]}, 3, root=tmp_path)
    again = make_reader({"a": Stateful([1, 2]), "b": [5, 6]}, record=True)
    again.on("epoch_end")(lambda trainer: trainer.save("end"))
    again.fit(resume=read.trainer.run_dir)
    sections, _ = read_checkpoint(again.checkpoint_dir / "end")
    assert again.step == 4 and list(sections["loaders"]["own"]) == ["a"]


def seen_by(loaders: Any, **options: Any) -> list[list[float]]:
    """What a run trains on: the first number of every batch, by epoch."""
    trainer = make_trainer(model=torch.nn.Linear(1, 1), data=loaders, lr=0.0, **{"max_epochs": 3, **options})
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
    ids=str,
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
    assert seen_by(Unknown(numbered(50)), limit_train_batches=2, max_epochs=2) == [[0, 1]] * 2
    with pytest.raises(TrainingError, match=r"limit_train_batches=0\.5: the length of a loader is unknown"):
        seen_by(Unknown(numbered(50)), limit_train_batches=0.5)


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
    options = {"data": {"a": numbered(2), "b": numbered(9)}, "val_dataloader": numbered(9), "overfit_batches": 3}
    trainer = make_trainer(model=torch.nn.Linear(1, 1), **options)
    trainer.on("validation_batch_start", name="eye")(lambda batch_idx: validated.append(batch_idx))
    assert trainer.total_steps == 5
    trainer.train()
    assert trainer.step == 5 and validated == [0, 1, 2]


def test_a_loader_before_the_current_one_keeps_its_state(tmp_path: Path) -> None:
    """A run that resumes inside the second loader restores the first one, too, which begins the next epoch."""

    class Passes(Unknown):
        """A loader whose batches say in which pass over it they come."""

        passes = 0

        def __iter__(self) -> Iterator[Any]:
            self.passes += 1
            yield from (10 * self.passes + item for item in self.items)

        def state_dict(self) -> dict[str, int]:
            return {"passes": self.passes}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.passes = state["passes"]

    whole = Reader({"a": Passes([1, 2]), "b": [5, 6]}, max_epochs=3)
    assert whole.batches == [11, 12, 5, 6, 21, 22, 5, 6, 31, 32, 5, 6]
    for count in (3, 7):
        read = Reader({"a": Passes([1, 2]), "b": [5, 6]}, count, root=tmp_path, max_epochs=3)
        again = Reader({"a": Passes([1, 2]), "b": [5, 6]}, resume=read, max_epochs=3)
        assert read.batches + again.batches == whole.batches
