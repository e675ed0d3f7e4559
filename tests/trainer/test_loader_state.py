"""Everything inside a loader that decides which samples come is found, saved once and put back."""

import bdb
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from read_batches import Reader
from saved_checkpoints import list_checkpoints
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from hookline import ResumableSampler
from hookline.checkpoints.store import read_checkpoint
from hookline.errors import CheckpointError


class Stateful(Sampler[int]):
    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class StatefulStream(IterableDataset[int]):
    place = 0
    state_dict, load_state_dict = Stateful.state_dict, Stateful.load_state_dict

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def saved_states(read: Reader) -> dict[str, Any]:
    """Return the states of the training loaders' parts in the newest checkpoint of a run."""
    sections, _ = read_checkpoint(list_checkpoints(read.trainer.checkpoint_dir)[-1])
    return sections["loaders"]["train"]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


@pytest.mark.parametrize(
    ("loader", "names"),
    [
        (lambda: DataLoader(range(4)), []),
        (lambda: DataLoader(range(4), shuffle=True, generator=generator()), ["x.generator"]),
        (lambda: DataLoader(range(4), sampler=RandomSampler(range(4), generator=generator())), ["x.sampler.generator"]),
        (lambda: DataLoader(range(4), sampler=Stateful()), ["x.sampler"]),
        (lambda: DataLoader(range(4), batch_sampler=BatchSampler(Stateful(), 2, False)), ["x.batch_sampler.sampler"]),
        (lambda: DataLoader(StatefulStream()), ["x.dataset"]),
        (lambda: DataLoader(range(4), sampler=ResumableSampler(range(4))), ["x.sampler"]),
        (lambda: [1, 2], []),
    ],
    ids=["plain", "generator", "sampler's generator", "sampler", "inside a batch sampler", "dataset", "ours", "list"],
)  # fmt: skip
def test_what_has_a_state(loader: Any, names: list[str], tmp_path: Path) -> None:
    """Each once, by where it is."""
    assert list(saved_states(Reader({"x": loader()}, 1, root=tmp_path))) == names


def test_states_come_back(tmp_path: Path) -> None:
    """Generators and samplers are put where they were; one that two loaders share is saved once."""
    shared, sampler = generator(), Stateful()
    loaders: dict[str, Any] = {
        "a": DataLoader(range(4), shuffle=True, generator=shared),
        "b": DataLoader(range(4), sampler=sampler, generator=shared),
    }
    read = Reader(loaders, 8, root=tmp_path)
    assert list(saved_states(read)) == ["a.generator", "b.sampler"]
    drawn = torch.rand(3, generator=shared)
    sampler.place = 9
    read.trainer.load_checkpoint(read.trainer.run_dir)
    assert torch.equal(torch.rand(3, generator=shared), drawn) and sampler.place == 0


def test_a_loader_that_rejects_its_state(tmp_path: Path) -> None:
    """The error says whose it was."""

    class Changed(Stateful):
        def load_state_dict(self, state: dict[str, int]) -> None:
            raise ValueError("another number of shards")

    read = Reader({"a": Changed(), "b": [1]}, 1, root=tmp_path)
    with pytest.raises(CheckpointError, match=r"loader 'a' rejects its saved state.*another number of shards"):
        Reader({"a": Changed(), "b": [1]}, resume=read)


class Watched(Dataset[int]):
    """Counts what workers read of it, too."""

    def __init__(self) -> None:
        self.read = torch.zeros(1).share_memory_()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        self.read += 1
        return index


@pytest.mark.parametrize(("draws", "workers", "samples"), [(False, 0, 8), (True, 0, 8), (False, 1, 8), (True, 1, 12)])
def test_where_a_loader_begins(draws: bool, workers: int, samples: int, tmp_path: Path) -> None:
    """With workers, a dataset that draws is read again; one that does not is entered in the middle."""

    def loader(data: Watched) -> DataLoader[int]:
        sampler = ResumableSampler(data, seed=1, dataset_draws=draws)
        return DataLoader(data, batch_size=2, sampler=sampler, num_workers=workers)

    whole = [batch.tolist() for batch in loader(Watched())]
    read, again = Reader(loader(Watched()), 2, root=tmp_path), Watched()
    rest = Reader(loader(again), resume=read)
    assert [batch.tolist() for batch in read.batches + rest.batches] == whole
    assert again.read.item() == samples


@pytest.mark.parametrize(
    "loader",
    [
        [1, 2],
        iter([1, 2]),
        DataLoader(range(4), batch_size=2),
        DataLoader(range(4), batch_size=2, sampler=ResumableSampler(range(4))),
    ],
    ids=["list", "iterator", "loader", "counted"],
)
def test_no_loader_starts_after_its_end(loader: Any, tmp_path: Path) -> None:
    """However it is passed over; an iterator is named as what it is."""
    once = r" \(an iterator can be read only once\)" if isinstance(loader, Iterator) else ""
    read = Reader({"a": [1, 2, 3, 4]}, 3, root=tmp_path)
    with pytest.raises(CheckpointError, match=f"trained on 3 batches of the loader 'a'.* has only 2{once}: resume"):
        Reader({"a": loader}, resume=read)


# ---- a state_dict that raises ----------------------------------------------------------------------------------------


class Raises:
    """What Accelerate's loaders have without torchdata: a state_dict that raises."""

    calls = 0

    def state_dict(self) -> dict[str, Any]:
        Raises.calls += 1
        raise AttributeError("no attribute 'dl_state_dict'")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing was saved that could be loaded")


@dataclass
class PreparedLoader(Raises):
    """Not hashable, as a dataclass is."""

    loader: Any

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


class RaisingSampler(Raises, Stateful):
    pass


class RaisingStream(Raises, StatefulStream):
    pass


RAISING: dict[str, Any] = {
    "x": lambda: PreparedLoader(DataLoader(range(4))),
    "x.sampler": lambda: DataLoader(range(4), sampler=RaisingSampler()),
    "x.dataset": lambda: DataLoader(RaisingStream()),
}


def return_a_set(self: Any) -> dict[str, Any]:
    return {"dl_state_dict": {1, 2}}


def fail(self: Any) -> dict[str, Any]:
    raise RuntimeError("no dl_state_dict")


@pytest.mark.parametrize("options", [{}, {"accumulate": 3}], ids=str)
@pytest.mark.parametrize("name", RAISING)
@pytest.mark.parametrize(
    "state_dict", [Raises.state_dict, property(fail), return_a_set], ids=["raises", "property", "set"]
)
def test_a_part_whose_state_cannot_be_saved_is_one_without(
    state_dict: Any, name: str, options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The run trains, saves and resumes as with a loader without a state; one warning names the part."""
    monkeypatch.setattr(Raises, "state_dict", state_dict)
    make = RAISING[name]
    read = Reader({"x": make()}, 3, root=tmp_path, max_epochs=3, **options)
    for _ in range(2):
        read.trainer.save_checkpoint()
    (warning,) = [line for line in caplog.messages if "cannot be saved" in line]
    assert f"'{name}'" in warning and "dl_state_dict" in warning
    rest = Reader({"x": make()}, resume=read, max_epochs=3, **options)
    assert [int(batch) for batch in read.batches + rest.batches] == [0, 1, 2, 3] * 3


def test_no_state_is_read_in_a_run_that_saves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A loader whose state_dict raises needs no warning there, and one that takes long costs nothing."""
    Raises.calls = 0
    assert len(Reader({"x": RAISING["x"]()}, max_epochs=2).batches) == 8
    assert Raises.calls == 0 and "state_dict" not in caplog.text


def test_quitting_the_debugger_in_a_state_dict_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the user's interruption, not a loader without a state."""

    def quit_debugger(self: Any) -> dict[str, Any]:
        raise bdb.BdbQuit

    monkeypatch.setattr(Raises, "state_dict", quit_debugger)
    with pytest.raises(KeyboardInterrupt, match="quit in the debugger in state_dict of PreparedLoader"):
        Reader({"x": RAISING["x"]()}, 3, root=tmp_path, max_epochs=3)
