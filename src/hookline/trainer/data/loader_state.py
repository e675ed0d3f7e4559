"""Save where loaders are in their data, and restore these positions in another process.

A loader with a `state_dict` that works saves its own position. Any other loader is started as it was started before,
with every random stream and every stateful part restored, and the batches that were trained on are skipped. Where that
is not enough for an exact resume, `resume_warnings` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from operator import attrgetter
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from hookline._console import logger
from hookline.checkpoints.format import encode
from hookline.core.failures import raise_if_quit
from hookline.errors import CheckpointError, error_text
from hookline.run.rng import restore_rng, rng_state
from hookline.trainer.data.sampler import SharedSampler

NamedLoaders = Mapping[str, Iterable[Any]]

_reported: WeakValueDictionary[int, Any] = WeakValueDictionary()  # parts whose state cannot be saved, by id
_PARTS = ("sampler", "batch_sampler", "batch_sampler.sampler", "dataset", "passes")


def known_length(loader: Iterable[Any]) -> int | None:
    """Return len(), or None if it raises: some datasets have the method but no length."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def has_state(part: Any) -> bool:
    """Return whether an object has `state_dict` and `load_state_dict`; a method that exists but raises counts."""
    try:
        return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))
    except Exception as error:
        raise_if_quit(error, f"state_dict of {type(part).__name__}")
        return True


# ---- stateful parts of loaders ---------------------------------------------------------------------------------------


def _stateful_parts(loaders: NamedLoaders) -> dict[str, Any]:
    """Return the generators, samplers and datasets of loaders that have a state, each once, by dotted name."""
    parts: dict[int, tuple[str, Any]] = {}
    for name, loader in loaders.items():
        owners = {name: loader}
        for path in _PARTS:
            with suppress(AttributeError):
                owners[f"{name}.{path}"] = attrgetter(path)(loader)
        for place, owner in owners.items():
            for part_name, part in ((f"{place}.generator", getattr(owner, "generator", None)), (place, owner)):
                if part is not loader and (isinstance(part, torch.Generator) or has_state(part)):
                    parts.setdefault(id(part), (part_name, part))
    return dict(parts.values())


def _part_state(part: Any) -> Any:
    return part.get_state() if isinstance(part, torch.Generator) else part.state_dict()


def _states(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of every part whose state can be read and saved.

    A class may have a `state_dict` that works only with some of its options, such as the loaders that Accelerate
    prepares. A part whose state_dict raises, or returns something that a checkpoint cannot hold, is treated as having
    none, and is reported once.
    """
    states = {}
    for name, part in parts.items():
        try:
            state = _part_state(part)
            encode(state)
            states[name] = state
        except Exception as error:
            raise_if_quit(error, f"state_dict of {type(part).__name__}")
            if _reported.get(id(part)) is part:
                continue
            with suppress(TypeError):  # a class with slots; it will be reported again
                _reported[id(part)] = part
            logger.warning(
                "%r (%s): its state_dict cannot be saved (%s); a run that resumes inside an epoch reads the loader "
                "again from the start of the epoch, up to where it was",
                name, type(part).__name__, error_text(error),
            )  # fmt: skip
    return states


def _restore_part(part: Any, state: Any) -> None:
    part.set_state(state) if isinstance(part, torch.Generator) else part.load_state_dict(state)


def source_states(loaders: NamedLoaders) -> dict[str, Any]:
    """Return the states of the loaders' generators, samplers and datasets by dotted name."""
    return _states(_stateful_parts(loaders))


def restore_source_states(loaders: NamedLoaders, states: Mapping[str, Any]) -> None:
    """Restore what `source_states` returned; a part that has no saved state is left alone."""
    for name, part in _stateful_parts(loaders).items():
        if name in states:
            _restore_part(part, states[name])


@contextmanager
def preserve_parts(training: NamedLoaders, validating: NamedLoaders, kinds: tuple[type, ...]) -> Iterator[None]:
    """Restore parts of the training loaders after a block that iterates over loaders.

    A validation may read a training loader, or one that shares its generator or sampler. Foreign samplers are left
    alone, because only their authors know what restoring one means while it is being read.

    Args:
        training: The training loaders.
        validating: The loaders that the block iterates over, which may be the training loaders themselves. Only parts
            that belong to both are restored.
        kinds: The types of the parts to restore.
    """
    read = {id(part) for part in _stateful_parts(validating).values()}
    shared = [part for part in _stateful_parts(training).values() if id(part) in read and isinstance(part, kinds)]
    states = [_part_state(part) for part in shared]
    try:
        yield
    finally:
        for part, state in zip(shared, states, strict=True):
            _restore_part(part, state)


# ---- one pass over a loader ------------------------------------------------------------------------------------------


def start_state(loaders: NamedLoaders) -> dict[str, Any]:
    """Return everything that decides which batches the loaders will yield; call it before they are iterated."""
    return {**rng_state(), "sources": source_states(loaders)}


def restore_start(loaders: NamedLoaders, state: dict[str, Any]) -> None:
    """Restore what `start_state` returned, so that the loaders yield the same batches again."""
    restore_rng(state)
    restore_source_states(loaders, state["sources"])


def loader_states(loaders: NamedLoaders) -> dict[str, Any]:
    """Return the state_dict of every loader that has one."""
    return _states({name: loader for name, loader in loaders.items() if has_state(loader)})


def restore_loader_states(loaders: NamedLoaders, states: Mapping[str, Any]) -> None:
    """Restore what `loader_states` returned."""
    for name, loader in loaders.items():
        if has_state(loader) and name in states:
            try:
                loader.load_state_dict(states[name])  # type: ignore[attr-defined]
            except Exception as error:
                raise_if_quit(error, f"load_state_dict of loader {name!r}")
                raise CheckpointError(f"loader {name!r} rejects its saved state: {error!r}") from error


def iterate_from(name: str, loader: Iterable[Any], count: int, start: int = 0) -> Iterator[Any]:
    """Iterate over a loader's batches after the first `count`.

    Args:
        name: The loader's name, for messages.
        loader: The loader.
        count: How many batches to skip. A `ResumableSampler` starts there; otherwise they are read and dropped.
        start: How many indices of its sampler's order, over all ranks, come before these batches.

    Returns:
        An iterator over the other batches.

    Raises:
        CheckpointError: If the loader has fewer batches.
    """
    sampler = shared_sampler(loader)
    if sampler is not None:
        sampler.start_at(start)
        # Without workers a dataset draws from the run's streams, which are restored; with workers, from theirs.
        if count and not (loader.num_workers and sampler.dataset_draws):  # type: ignore[attr-defined]
            if len(loader) < count:  # type: ignore[arg-type]
                raise_shorter_loader(name, loader, count, len(loader))  # type: ignore[arg-type]
            sampler.start_at(start + count * loader.batch_size * sampler.world_size)  # type: ignore[attr-defined]
            return iter(loader)
    batches = iter(loader)
    if (read := sum(1 for _ in islice(batches, count))) < count:
        raise_shorter_loader(name, loader, count, read)
    return batches


def raise_shorter_loader(name: str, loader: Iterable[Any], count: int, length: int) -> NoReturn:
    """Raise CheckpointError for a loader that ends before the saved position.

    Args:
        name: The loader's name.
        loader: The loader.
        count: The number of its batches that the run had trained on.
        length: The number of batches that it has now.
    """
    once = " (an iterator can be read only once)" if isinstance(loader, Iterator) else ""
    raise CheckpointError(
        f"the run had trained on {count} batches of the loader {name!r}, inside an epoch, and now this loader has only "
        f"{length}{once}: resume with the same loader, or from a checkpoint between two epochs"
    )


def shared_sampler(loader: Any) -> SharedSampler | None:
    """Return the sampler of a DataLoader that can start at any place of an order that ranks share, if it is one."""
    sampler = index_sampler(loader) if isinstance(loader, DataLoader) and loader.batch_size is not None else None
    return sampler if isinstance(sampler, SharedSampler) else None


def index_sampler(loader: DataLoader[Any]) -> Any:
    """Return the sampler whose indices a DataLoader reads; None if it has a different kind of batch sampler."""
    if loader.batch_sampler is None:
        return loader.sampler
    # A loader with a custom batch sampler also has a sampler, which it does not use.
    return loader.batch_sampler.sampler if type(loader.batch_sampler) is BatchSampler else None


def set_epochs(loaders: NamedLoaders, epoch: int) -> None:
    """Call `set_epoch` of the loaders' samplers, such as a DistributedSampler, whose order would repeat."""
    for loader in loaders.values():
        for path in ("sampler", "batch_sampler", "batch_sampler.sampler"):
            with suppress(AttributeError):
                if callable(set_epoch := attrgetter(f"{path}.set_epoch")(loader)):
                    set_epoch(epoch)


def resume_warnings(loaders: NamedLoaders, is_cut: bool) -> list[str]:
    """Return a sentence for each loader that might yield different batches if a run resumes inside an epoch.

    Args:
        loaders: The training loaders by name.
        is_cut: Whether an epoch may end before its loaders do.
    """
    warnings = []
    for name, loader in loaders.items():
        loader = getattr(loader, "base_dataloader", loader)  # Accelerate wraps the loader that it prepares.
        dataset = loader.dataset if isinstance(loader, DataLoader) else None
        workers = loader.num_workers if isinstance(loader, DataLoader) else 0
        if has_state(loader):
            if not is_cut:
                continue
            why = "is cut off before its end: the next epoch starts it again, not at its saved state"
        elif isinstance(loader, Iterator):
            remedy = "pass a loader, or one with state_dict and load_state_dict"
            why = f"is an iterator, which can be read only once: {remedy}"
        elif isinstance(dataset, IterableDataset) and not has_state(dataset):
            why = "has an IterableDataset without state_dict: its stream is reread from the start of the epoch"
        elif workers and getattr(loader, "persistent_workers", False):
            why = "keeps its workers between epochs: if the dataset draws random numbers, theirs cannot be restored"
        elif workers and not getattr(loader, "in_order", True):
            why = "returns batches as they become ready (in_order=False), so the order differs from run to run"
        else:
            continue
        warnings.append(f"loader {name!r} {why}")
    return warnings
