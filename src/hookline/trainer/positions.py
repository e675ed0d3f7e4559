"""Where the loaders are in their data, and how they get back there in another process.

Three kinds of loader: one with a `state_dict` of its own says where it is; the others begin as they did, with every
random stream and every part that has a state where it was, and pass over what was trained on; for some, that is not
enough to be exact, and `doubts_about` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from hookline.errors import CheckpointError
from hookline.trainer.rng import restore_rng, rng_state
from hookline.trainer.sampler import ResumableSampler

Loaders = Mapping[str, Iterable[Any]]

_PARTS = ("", ".sampler", ".batch_sampler", ".batch_sampler.sampler", ".dataset")


def has_state(thing: Any) -> bool:
    """Whether it can say where it is and be put back there."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


@dataclass(frozen=True)
class Source:
    """A part of a loader that has a state: a generator, a sampler, a dataset."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]


def sources_of(loaders: Loaders) -> list[Source]:
    """Everything inside the loaders that decides which samples come, each once."""
    found: dict[int, Source] = {}
    for name, part in _parts_of(loaders):
        if isinstance(part, torch.Generator) or has_state(part):
            found.setdefault(id(part), _source(name, part))
    return list(found.values())


def _parts_of(loaders: Loaders) -> Iterator[tuple[str, Any]]:
    """What stands in the loaders, by where; the loaders themselves are not their parts."""
    for name, loader in loaders.items():
        for path in _PARTS:
            owner = _part(loader, path)
            yield f"{name}{path}.generator", getattr(owner, "generator", None)
            if path:
                yield f"{name}{path}", owner


def _part(loader: Any, path: str) -> Any:
    for name in path.split(".")[1:]:
        loader = getattr(loader, name, None)
    return loader


def _source(name: str, part: Any) -> Source:
    if isinstance(part, torch.Generator):
        return Source(name, part.get_state, part.set_state)
    return Source(name, part.state_dict, part.load_state_dict)


def states_of(loaders: Loaders) -> dict[str, Any]:
    """The sources' states, by name."""
    return {source.name: source.get() for source in sources_of(loaders)}


def restore_states(loaders: Loaders, states: Mapping[str, Any]) -> None:
    """Put the sources back to where they were; one that was not there then stays as it is."""
    for source in sources_of(loaders):
        if source.name in states:
            source.put(states[source.name])


@contextmanager
def generators_untouched(loaders: Loaders) -> Iterator[None]:
    """Whatever is drawn inside the block, the loaders' generators are then where they were: several may share one."""
    with _untouched([source for source in sources_of(loaders) if source.name.endswith(".generator")]):
        yield


@contextmanager
def order_untouched(training: Loaders, validating: Loaders) -> Iterator[None]:
    """Whatever the one are read for inside the block, the others' order is as if nothing had been.

    A validation may be on a training loader, too, or on one with the same generator or sampler. Others' samplers are
    left alone: what it means to put one back while it is being read is theirs to know.
    """
    read = {id(part) for _, part in _parts_of(validating)}
    kinds = torch.Generator, ResumableSampler
    shared = {id(part): part for _, part in _parts_of(training) if isinstance(part, kinds) and id(part) in read}
    with _untouched([_source("", part) for part in shared.values()]):
        yield


@contextmanager
def _untouched(sources: list[Source]) -> Iterator[None]:
    states = [source.get() for source in sources]
    try:
        yield
    finally:
        for source, state in zip(sources, states, strict=True):
            source.put(state)


def beginning_of(loaders: Loaders) -> dict[str, Any]:
    """Everything that decides which batches the loaders will give: taken before they begin."""
    return {**rng_state(), "sources": states_of(loaders)}


def back_to_beginning(loaders: Loaders, state: dict[str, Any]) -> None:
    """Let the loaders begin as they did."""
    restore_rng(state)
    restore_states(loaders, state["sources"])


def own_states(loaders: Loaders) -> dict[str, Any]:
    """Where the loaders say that they are, those that can."""
    return {name: loader.state_dict() for name, loader in loaders.items() if has_state(loader)}  # type: ignore[attr-defined]


def restore_own_states(loaders: Loaders, states: Mapping[str, Any]) -> None:
    """Tell the loaders that can where they were."""
    for name, loader in loaders.items():
        if has_state(loader) and name in states:
            try:
                loader.load_state_dict(states[name])  # type: ignore[attr-defined]
            except Exception as error:
                raise CheckpointError(f"loader {name!r} does not take its saved state: {error!r}") from error


def begin_after(name: str, loader: Iterable[Any], count: int) -> Iterator[Any]:
    """The loader's batches after the first `count`; where they must, these are read and thrown away."""
    if count and _can_start_inside(loader):
        if len(loader) < count:  # type: ignore[arg-type]
            refuse_shorter_loader(name, loader, count, len(loader))  # type: ignore[arg-type]
        loader.sampler.start_at(count * loader.batch_size)  # type: ignore[attr-defined]
        return iter(loader)
    batches = iter(loader)
    for came in range(count):
        try:
            next(batches)
        except StopIteration:
            refuse_shorter_loader(name, loader, count, came)
    return batches


def refuse_shorter_loader(name: str, loader: Iterable[Any], count: int, came: int) -> NoReturn:
    """A run that was inside a loader cannot go on behind its end."""
    once = " (an iterator can be read only once)" if isinstance(loader, Iterator) else ""
    raise CheckpointError(
        f"the run stood behind batch {count} of the loader {name!r}, inside an epoch, and now this loader has only "
        f"{came}{once}: go on with the loader that it had, or from a checkpoint between two epochs"
    )


def _can_start_inside(loader: Any) -> bool:
    """Without workers a dataset draws from the run's streams, which are restored; with them, from the workers' own."""
    if not isinstance(loader, DataLoader) or not isinstance(loader.sampler, ResumableSampler):
        return False
    plain = loader.batch_size is not None and type(loader.batch_sampler) is BatchSampler
    return plain and not (loader.num_workers and loader.sampler.dataset_draws)


def doubts_about(loaders: Loaders) -> list[str]:
    """Why a run that goes on in mid-epoch might not see the batches that it would have seen, a sentence each."""
    cut = getattr(loaders, "limit", None) is not None
    return [f"loader {name!r} {doubt}" for name, loader in loaders.items() if (doubt := _doubt(loader, cut))]


def _doubt(loader: Any, cut: bool) -> str | None:
    if has_state(loader):
        return "is cut off before its end: between two epochs it begins anew, not where it says it was" if cut else None
    if isinstance(loader, Iterator):
        return "is an iterator, which can be read only once: give a loader, or one with state_dict and load_state_dict"
    if not isinstance(loader, DataLoader):
        return None
    if isinstance(loader.dataset, IterableDataset) and not has_state(loader.dataset):
        return "has an IterableDataset without state_dict: its stream is read again from the epoch's beginning"
    if loader.num_workers and loader.persistent_workers:
        return "keeps its workers from epoch to epoch: if the dataset draws random numbers, theirs cannot be restored"
    if loader.num_workers and not getattr(loader, "in_order", True):
        return "gives batches as they are ready (in_order=False), which is another order each time"
    return None
