"""Save where loaders are in their data, and bring them back there in another process.

A loader with a `state_dict` saves its own position. Any other loader is started as it was started before, with every
random stream and every stateful part restored, and the batches that were trained on are skipped. Where that is not
enough to be exact, `resume_warnings` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from hookline.errors import CheckpointError
from hookline.trainer.data.sampler import ResumableSampler
from hookline.trainer.rng import restore_rng, rng_state

Loaders = Mapping[str, Iterable[Any]]

_PARTS = ("", ".sampler", ".batch_sampler", ".batch_sampler.sampler", ".dataset")


def has_state(part: Any) -> bool:
    """Return whether an object has `state_dict` and `load_state_dict`."""
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))


# ---- stateful parts of loaders ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """A stateful part of a loader: a generator, a sampler or a dataset."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]


def _parts(loaders: Loaders) -> Iterator[tuple[str, Any]]:
    """Yield the parts of loaders with their dotted names, without the loaders themselves."""
    for name, loader in loaders.items():
        for path in _PARTS:
            try:
                owner = attrgetter(path[1:])(loader) if path else loader
            except AttributeError:
                owner = None
            yield f"{name}{path}.generator", getattr(owner, "generator", None)
            if path:
                yield f"{name}{path}", owner


def _sources(loaders: Loaders) -> list[_Source]:
    """Return every stateful part of the loaders once."""
    found: dict[int, _Source] = {}
    for name, part in _parts(loaders):
        if isinstance(part, torch.Generator) or has_state(part):
            found.setdefault(id(part), _source(name, part))
    return list(found.values())


def _source(name: str, part: Any) -> _Source:
    if isinstance(part, torch.Generator):
        return _Source(name, part.get_state, part.set_state)
    return _Source(name, part.state_dict, part.load_state_dict)


def source_states(loaders: Loaders) -> dict[str, Any]:
    """Return the states of the loaders' generators, samplers and datasets by dotted name."""
    return {source.name: source.get() for source in _sources(loaders)}


def restore_source_states(loaders: Loaders, states: Mapping[str, Any]) -> None:
    """Restore what `source_states` returned; a part that has no saved state is left alone."""
    for source in _sources(loaders):
        if source.name in states:
            source.put(states[source.name])


@contextmanager
def preserve_generators(loaders: Loaders) -> Iterator[None]:
    """Restore the loaders' generators after the block; several loaders may share one."""
    with _preserve([source for source in _sources(loaders) if source.name.endswith(".generator")]):
        yield


@contextmanager
def preserve_order(training: Loaders, validating: Loaders) -> Iterator[None]:
    """Restore the order of the training loaders after a block that reads the validation loaders.

    A validation may read a training loader, or one that shares its generator or sampler. Foreign samplers are left
    alone, because only their author knows what restoring one means while it is being read.
    """
    read = {id(part) for _, part in _parts(validating)}
    kinds = torch.Generator, ResumableSampler
    shared = {id(part): part for _, part in _parts(training) if isinstance(part, kinds) and id(part) in read}
    with _preserve([_source("", part) for part in shared.values()]):
        yield


@contextmanager
def _preserve(sources: list[_Source]) -> Iterator[None]:
    states = [source.get() for source in sources]
    try:
        yield
    finally:
        for source, state in zip(sources, states, strict=True):
            source.put(state)


# ---- one pass over a loader ------------------------------------------------------------------------------------------


def start_state(loaders: Loaders) -> dict[str, Any]:
    """Return everything that decides which batches the loaders will give; call it before they are iterated."""
    return {**rng_state(), "sources": source_states(loaders)}


def restore_start(loaders: Loaders, state: dict[str, Any]) -> None:
    """Restore what `start_state` returned, so that the loaders give the same batches again."""
    restore_rng(state)
    restore_source_states(loaders, state["sources"])


def loader_states(loaders: Loaders) -> dict[str, Any]:
    """Return the state_dict of every loader that has one."""
    return {name: loader.state_dict() for name, loader in loaders.items() if has_state(loader)}  # type: ignore[attr-defined]


def restore_loader_states(loaders: Loaders, states: Mapping[str, Any]) -> None:
    """Restore what `loader_states` returned."""
    for name, loader in loaders.items():
        if has_state(loader) and name in states:
            try:
                loader.load_state_dict(states[name])  # type: ignore[attr-defined]
            except Exception as error:
                raise CheckpointError(f"loader {name!r} does not take its saved state: {error!r}") from error


def iterate_from(name: str, loader: Iterable[Any], count: int) -> Iterator[Any]:
    """Iterate over a loader's batches after the first `count`.

    Args:
        name: The loader's name, for messages.
        loader: The loader.
        count: How many batches to skip. A `ResumableSampler` starts there; else they are read and dropped.

    Returns:
        An iterator over the other batches.

    Raises:
        CheckpointError: If the loader has fewer batches.
    """
    if count and _can_start_inside(loader):
        if len(loader) < count:  # type: ignore[arg-type]
            raise_shorter_loader(name, loader, count, len(loader))  # type: ignore[arg-type]
        loader.sampler.start_at(count * loader.batch_size)  # type: ignore[attr-defined]
        return iter(loader)
    batches = iter(loader)
    for read in range(count):
        try:
            next(batches)
        except StopIteration:
            raise_shorter_loader(name, loader, count, read)
    return batches


def raise_shorter_loader(name: str, loader: Iterable[Any], count: int, length: int) -> NoReturn:
    """Raise CheckpointError for a loader that ends before the saved position.

    Args:
        name: The loader's name.
        loader: The loader.
        count: The batches of it that the run had trained on.
        length: The batches that it has now.
    """
    once = " (an iterator can be read only once)" if isinstance(loader, Iterator) else ""
    raise CheckpointError(
        f"the run had trained on {count} batches of the loader {name!r}, inside an epoch, and now this loader has only "
        f"{length}{once}: resume with the same loader, or from a checkpoint between two epochs"
    )


def _can_start_inside(loader: Any) -> bool:
    """Return whether the skipped batches need not be read.

    Without workers a dataset draws from the run's streams, which are restored; with workers, from the workers' streams.
    """
    if not isinstance(loader, DataLoader) or not isinstance(loader.sampler, ResumableSampler):
        return False
    plain = loader.batch_size is not None and type(loader.batch_sampler) is BatchSampler
    return plain and not (loader.num_workers and loader.sampler.dataset_draws)


def resume_warnings(loaders: Loaders) -> list[str]:
    """Return a sentence for each loader that might give other batches to a run that resumes inside an epoch."""
    is_cut = getattr(loaders, "limit", None) is not None
    return [f"loader {name!r} {why}" for name, loader in loaders.items() if (why := _why_not_exact(loader, is_cut))]


def _why_not_exact(loader: Any, is_cut: bool) -> str | None:
    if has_state(loader):
        return "is cut off before its end: the next epoch starts it again, not at its saved state" if is_cut else None
    if isinstance(loader, Iterator):
        return "is an iterator, which can be read only once: give a loader, or one with state_dict and load_state_dict"
    if not isinstance(loader, DataLoader):
        return None
    if isinstance(loader.dataset, IterableDataset) and not has_state(loader.dataset):
        return "has an IterableDataset without state_dict: its stream is read again from the start of the epoch"
    if loader.num_workers and loader.persistent_workers:
        return "keeps its workers between epochs: if the dataset draws random numbers, theirs cannot be restored"
    if loader.num_workers and not getattr(loader, "in_order", True):
        return "gives batches as they are ready (in_order=False), which is another order every time"
    return None
