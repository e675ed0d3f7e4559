"""Give loaders names, and work out how many batches an epoch of them has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NoReturn

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hookline.errors import ConfigError, TrainingError, with_article
from hookline.run.rng import preserve_rng, seed_everything
from hookline.trainer.data.loader_state import has_state, known_length
from hookline.trainer.data.mixing import LoaderSchedule
from hookline.trainer.data.sampler import ResumableSampler, ShareOf
from hookline.trainer.options import TrainerOptions

Loaders = Any  # one iterable, a list of them or a dict of them

# These samplers give as many indices as their len() says.
_COUNTING_SAMPLERS = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
    ResumableSampler,
    ShareOf,
)


def named_loaders(loaders: Loaders, role: str) -> dict[str, Iterable[Any]]:
    """Return every loader under a name.

    Args:
        loaders: One loader, a list or a dict of loaders, or None.
        role: What they are for ('train', 'val'); the name of a single loader.

    Returns:
        The loaders by their key in a dict, or by their index in a list.

    Raises:
        ConfigError: If two keys are the same string.
        TrainingError: If a loader is not iterable or empty.
    """
    if loaders is None:
        return {}
    if isinstance(loaders, Mapping):
        found = {}
        for key, loader in loaders.items():
            if str(key) in found:  # one of the two loaders would be lost
                keys = " and ".join(repr(other) for other in loaders if str(other) == str(key))
                why = f"the keys {keys} are the same string; give every loader its own name"
                raise ConfigError(f"{role} loaders", why)
            found[str(key)] = loader
    elif isinstance(loaders, (list, tuple)) and loaders and not _is_list_of_batches(loaders):
        found = {str(index): loader for index, loader in enumerate(loaders)}
    else:
        found = {role: loaders}
    for name, loader in found.items():
        if not isinstance(loader, Iterable):
            raise TrainingError(
                f"{role} loader {name!r} is {with_article(type(loader).__name__)}, not something to iterate over"
            )
        if known_length(loader) == 0:
            raise TrainingError(f"{role} loader {name!r} is empty: it has no batches")
    return found


def _is_list_of_batches(loaders: Any) -> bool:
    """Return whether a list holds batches (tensors, tuples, dicts), which makes it one loader, rather than loaders."""
    first = loaders[0]
    return (
        isinstance(first, (tuple, Mapping))
        or hasattr(first, "shape")
        or (isinstance(first, list) and bool(first) and hasattr(first[0], "shape"))
    )


class TrainLoaders(dict[str, Iterable[Any]]):
    """Training loaders by name, with the schedule that mixes them and the limits of an epoch.

    Args:
        loaders: The loaders by name.
        schedule: How they are mixed.
        limit: The most batches of an epoch, of all loaders together.
        each: The most batches of each loader, if they are read one after another.
    """

    def __init__(
        self,
        loaders: Mapping[str, Iterable[Any]],
        schedule: LoaderSchedule,
        limit: int | None = None,
        each: int | None = None,
    ) -> None:
        super().__init__(loaders)
        self.schedule, self.limit, self.each = schedule, limit, each
        # The state_dict of loaders that have one, as it was when they were last between two passes over their data.
        self.idle_states: dict[str, Any] = {}


def make_train_loaders(loaders: Loaders, options: TrainerOptions) -> TrainLoaders:
    """Return the training loaders by name, mixed and limited as the options say."""
    schedule, tried = LoaderSchedule.from_options(options), options.fast_dev_run
    found = TrainLoaders(named_loaders(loaders, "train"), schedule, each=tried or None)
    if not found:
        return found
    schedule.check(found)
    if tried and not schedule.sequential:  # drawing by weight might leave a loader out
        found.schedule = replace(schedule, kind="round_robin", weights=None)
    limit = options.limit_train_batches
    if isinstance(limit, float):
        length = epoch_length(found)
        if length is None:
            weighted = found.schedule.kind == "weighted"
            why = "loaders are drawn by weight" if weighted else "the length of a loader is unknown"
            raise TrainingError(f"limit_train_batches={limit}: {why}; give an integer")
        limit = max(1, int(limit * length))
    limits = [limit]
    if options.overfit_batches:
        limits.append(_length_of_first(found, options.overfit_batches))
    if tried:  # a short loader of a mixture starts again
        limits.append(_length_of_first(found, tried) if schedule.sequential else tried * len(found))
    found.limit = smallest(*limits)
    return found


def _length_of_first(loaders: TrainLoaders, count: int) -> int | None:
    """Return the batches of an epoch that has the first `count` batches of each loader."""
    return loaders.schedule.length([min(known_length(loader) or count, count) for loader in loaders.values()])


def first_batches(loaders: Mapping[str, Iterable[Any]], count: int, seed: int | None) -> dict[str, Iterable[Any]]:
    """Read the first batches of each loader into lists; the same ones in every attempt, shuffled or not.

    Args:
        loaders: The loaders by name.
        count: How many batches to read of each.
        seed: Seeds the random streams while reading; they are restored afterwards.

    Returns:
        A list of batches for each loader.
    """
    with preserve_rng():
        seed_everything(seed or 0)
        return {name: list(islice(loader, count)) for name, loader in loaders.items()}


def epoch_length(loaders: TrainLoaders) -> int | None:
    """Return the batches of one epoch; None if the length of a loader is unknown."""
    return smallest(loaders.schedule.length([known_length(loader) for loader in loaders.values()]), loaders.limit)


def smallest(*limits: int | None) -> int | None:
    """Return the smallest of some limits, each of which may be None."""
    return min((limit for limit in limits if limit is not None), default=None)


def trusted_length(loader: Iterable[Any]) -> int | None:
    """Return the length of a loader if it may be trusted, else None.

    That is a list's, or a DataLoader's whose sampler counts its own indices. A loader with a state_dict must be read
    to its end, or its state would say that it is still inside the epoch; so its length is not used.
    """
    if has_state(loader):
        return None
    if isinstance(loader, DataLoader):
        sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        inner = getattr(sampler, "sampler", sampler)
        plain = type(loader).__len__ is DataLoader.__len__ and type(loader).__iter__ is DataLoader.__iter__
        counts = type(inner) in _COUNTING_SAMPLERS and type(sampler) in (type(inner), BatchSampler)
        return known_length(loader) if plain and counts else None
    return len(loader) if isinstance(loader, Sequence) else None


def raise_no_batches(role: str, name: str, loader: Iterable[Any]) -> NoReturn:
    """Raise TrainingError for one loader of several that gave no batch."""
    raise TrainingError(f"the {role} loader {name!r} gave no batch{why_empty({name: loader})}")


def why_empty(loaders: Mapping[str, Iterable[Any]]) -> str:
    """Return the likely reason why loaders gave no batch, as the end of a sentence."""
    if any(isinstance(loader, Iterator) for loader in loaders.values()):
        return ": it is an iterator, which can be read only once; give a list or a DataLoader"
    return ": check the dataset and the sampler"
