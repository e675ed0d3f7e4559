"""Everything inside a loader that decides which samples come is found, saved once and put back."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from hookline import ResumableSampler
from hookline.errors import CheckpointError
from hookline.trainer.data.loader_state import (
    iterate_from,
    loader_states,
    restore_loader_states,
    restore_source_states,
    source_states,
)


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


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


@pytest.mark.parametrize(
    ("loader", "names"),
    [
        (lambda: DataLoader(range(4)), []),  # type: ignore[arg-type]
        (lambda: DataLoader(range(4), shuffle=True, generator=generator()), ["x.generator"]),  # type: ignore[arg-type]
        (lambda: DataLoader(range(4), sampler=RandomSampler(range(4), generator=generator())), ["x.sampler.generator"]),  # type: ignore[arg-type]
        (lambda: DataLoader(range(4), sampler=Stateful()), ["x.sampler"]),  # type: ignore[arg-type]
        (lambda: DataLoader(range(4), batch_sampler=BatchSampler(Stateful(), 2, False)), ["x.batch_sampler.sampler"]),  # type: ignore[arg-type]
        (lambda: DataLoader(StatefulStream()), ["x.dataset"]),
        (lambda: DataLoader(range(4), sampler=ResumableSampler(range(4))), ["x.sampler"]),  # type: ignore[arg-type]
        (lambda: [1, 2], []),
    ],
    ids=["plain", "generator", "sampler's generator", "sampler", "inside a batch sampler", "dataset", "ours", "list"],
)  # fmt: skip
def test_what_has_a_state(loader: Any, names: list[str]) -> None:
    """Each once, by where it is."""
    assert list(source_states({"x": loader()})) == names


def test_states_come_back() -> None:
    """Generators and samplers are put where they were; one that two loaders share is saved once."""
    shared, sampler = generator(), Stateful()
    loaders: dict[str, Any] = {
        "a": DataLoader(range(4), shuffle=True, generator=shared),  # type: ignore[arg-type]
        "b": DataLoader(range(4), sampler=sampler, generator=shared),  # type: ignore[arg-type]
    }
    states = source_states(loaders)
    assert list(states) == ["a.generator", "b.sampler"]
    drawn = torch.rand(3, generator=shared)
    sampler.place = 9
    restore_source_states(loaders, states)
    assert torch.equal(torch.rand(3, generator=shared), drawn) and sampler.place == 0
    restore_source_states({"a": [1]}, states)


def test_a_loader_that_rejects_its_state() -> None:
    """The error says whose it was."""

    class Changed(Stateful):
        def load_state_dict(self, state: dict[str, int]) -> None:
            raise ValueError("another number of shards")

    assert loader_states({"a": Changed(), "b": [1]}) == {"a": {"place": 0}}
    with pytest.raises(CheckpointError, match=r"loader 'a' does not take its saved state.*another number of shards"):
        restore_loader_states({"a": Changed()}, {"a": {"place": 0}})


@pytest.mark.parametrize(("draws", "read"), [(False, 4), (True, 6)])
def test_where_a_loader_begins(draws: bool, read: int) -> None:
    """With workers, a dataset that draws is read again; one that does not is entered in the middle."""
    sampler = ResumableSampler(range(12), seed=1, dataset_draws=draws)
    loader: Any = DataLoader(range(12), batch_size=2, sampler=sampler, num_workers=1)  # type: ignore[arg-type]
    whole = [batch.tolist() for batch in loader]
    sampler.epoch = 0
    rest = iterate_from("a", loader, 2)
    assert [batch.tolist() for batch in rest] == whole[2:]
    assert rest._rcvd_idx == read  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "loader",
    [
        [1, 2],
        iter([1, 2]),
        DataLoader(range(4), batch_size=2),  # type: ignore[arg-type]
        DataLoader(range(4), batch_size=2, sampler=ResumableSampler(range(4))),  # type: ignore[arg-type]
    ],
    ids=["list", "iterator", "loader", "counted"],
)
def test_no_loader_starts_after_its_end(loader: Any) -> None:
    """However it is passed over; an iterator is named as what it is."""
    once = r" \(an iterator can be read only once\)" if isinstance(loader, Iterator) else ""
    with pytest.raises(CheckpointError, match=f"trained on 3 batches of the loader 'a'.* has only 2{once}: resume"):
        iterate_from("a", loader, 3)
