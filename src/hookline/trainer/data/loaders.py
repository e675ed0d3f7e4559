"""Name the loaders, decide which of them provides the next batch, and how many batches an epoch has."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any, NoReturn

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hookline._words import nearest
from hookline.errors import ConfigError, TrainingError, with_article
from hookline.run.rng import preserve_rng, seed_everything
from hookline.trainer.data.loader_state import has_state, index_sampler, known_length
from hookline.trainer.data.sampler import ResumableSampler, ShareOf
from hookline.trainer.options import TrainerOptions

Loaders = Any  # one iterable, a list of iterables or a dict of them

# These samplers yield exactly as many indices as len() states.
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
        role: Their purpose ('train', 'val'); also the name of a single loader.

    Returns:
        The loaders by their key in a dict, or by their index in a list.

    Raises:
        ConfigError: If two keys are the same string.
        TrainingError: If a loader is not iterable, or is empty.
    """
    if loaders is None:
        return {}
    if isinstance(loaders, Mapping):
        named = {}
        for key, loader in loaders.items():
            if str(key) in named:  # one of the two loaders would be lost
                keys = " and ".join(repr(other) for other in loaders if str(other) == str(key))
                why = f"the keys {keys} are the same string; give every loader its own name"
                raise ConfigError(f"{role} loaders", why)
            named[str(key)] = loader
    elif isinstance(loaders, (list, tuple)) and loaders and not _is_list_of_batches(loaders):
        named = {str(index): loader for index, loader in enumerate(loaders)}
    else:
        named = {role: loaders}
    for name, loader in named.items():
        if not isinstance(loader, Iterable) or isinstance(loader, torch.nn.Module):  # nn.Sequential can be iterated
            remedy = "; pass a DataLoader of it" if isinstance(loader, Dataset) else ""
            kind = with_article(type(loader).__name__)
            raise TrainingError(f"{role} loader {name!r} is {kind}, not something to iterate over{remedy}")
        if known_length(loader) == 0:
            raise TrainingError(f"{role} loader {name!r} is empty: it has no batches")
    return named


def _is_list_of_batches(loaders: Any) -> bool:
    """Return whether a list holds batches (tensors, tuples, dicts), which makes it one loader, rather than loaders."""
    first = loaders[0]
    return (
        isinstance(first, (tuple, Mapping))
        or hasattr(first, "shape")
        or (isinstance(first, list) and bool(first) and hasattr(first[0], "shape"))
    )


class RoundRobin:
    """An endless sequence of loader indices: every loader in turn, then again from the first."""

    def __init__(self, count: int) -> None:
        self._count, self._taken = count, 0

    def next(self) -> int:
        """Return the index of the next loader."""
        self._taken += 1
        return (self._taken - 1) % self._count

    def state(self) -> int:
        """Return how many indices were returned."""
        return self._taken

    def restore(self, state: int) -> None:
        """Restore a saved state."""
        self._taken = state


class Weighted:
    """An endless sequence of loader indices, drawn by weight from a separate generator.

    Drawing does not advance training's streams, and hooks do not advance this one.
    """

    def __init__(self, weights: Sequence[float], seed: int, epoch: int) -> None:
        self._bounds = list(accumulate(weights))
        # Seeded by epoch, so that there is nothing to save between two epochs.
        self._generator = random.Random(f"loaders of epoch {epoch}, seed {seed}")

    def next(self) -> int:
        """Return the index of the next loader."""
        return bisect(self._bounds, self._generator.random() * self._bounds[-1], hi=len(self._bounds) - 1)

    def state(self) -> Any:
        """Return the generator's state."""
        return self._generator.getstate()

    def restore(self, state: Any) -> None:
        """Restore a saved state."""
        self._generator.setstate(state)


class TrainLoaders(dict[str, Iterable[Any]]):
    """Training loaders by name, how the options mix them, and the limits of an epoch.

    Args:
        loaders: One loader, a list or a dict of loaders, or None.
        options: The options of the run.

    Raises:
        ConfigError: If there are weights and they do not match the loaders.
    """

    def __init__(self, loaders: Loaders, options: TrainerOptions) -> None:
        super().__init__(named_loaders(loaders, "train"))
        self.kind, self.end, self._seed = options.loader_schedule, options.loader_end, options.seed or 0
        # Loader names are strings, even those of a list of loaders.
        self._weights = {str(name): weight for name, weight in (options.loader_weights or {}).items()}
        self.limit: int | None = None  # the maximum number of batches of an epoch, over all loaders
        self.each = options.fast_dev_run or None  # the maximum per loader, if they are read one after another
        # The state_dict of loaders that have one, as it was when they were last between two passes over their data.
        self.idle_states: dict[str, Any] = {}
        if self:
            for name in self._weights:
                if name not in self:
                    raise ConfigError(f"trainer.loader_weights.{name}", f"no such loader; {nearest(name, self)}")
            missing = [name for name in self if self._weights and name not in self._weights]
            if missing:
                raise ConfigError("trainer.loader_weights", f"no weight for {', '.join(map(repr, missing))}")
            self._set_limit(options)

    @property
    def mixed(self) -> bool:
        """Whether batches of several loaders alternate, instead of each loader being read to its end."""
        return len(self) > 1 and self.kind != "sequential"

    def order(self, epoch: int) -> RoundRobin | Weighted:
        """Return the order in which one epoch reads the loaders."""
        if self.kind == "round_robin":
            return RoundRobin(len(self))
        return Weighted([self._weights.get(name, 1.0) for name in self], self._seed, epoch)

    def total(self, lengths: Iterable[int | None]) -> int | None:
        """Return the batches of one epoch without limits; None if a length is unknown or the loaders are drawn.

        Args:
            lengths: The batches of each loader.
        """
        known = [length for length in lengths if length is not None]
        if len(known) < len(self) or (self.mixed and self.kind == "weighted"):
            return None
        if not self.mixed:
            return sum(known)
        if self.end == "shortest":  # up to the batch at which the first loader is exhausted
            return min(length * len(known) + index for index, length in enumerate(known))
        return max((length - 1) * len(known) + index + 1 for index, length in enumerate(known))

    def _set_limit(self, options: TrainerOptions) -> None:
        tried, limit = options.fast_dev_run, options.limit_train_batches
        if tried and self.mixed:  # drawing by weight might leave a loader out
            self.kind = "round_robin"
        if isinstance(limit, float):
            length = epoch_length(self)
            if length is None:
                weighted = self.kind == "weighted"
                why = "loaders are drawn by weight" if weighted else "the length of a loader is unknown"
                raise TrainingError(f"limit_train_batches={limit}: {why}; pass an integer")
            limit = max(1, int(limit * length))
        limits = [limit]
        if options.overfit_batches:
            limits.append(self._length_of_first(options.overfit_batches))
        if tried:  # a short loader of a mixture starts again
            limits.append(tried * len(self) if self.mixed else self._length_of_first(tried))
        self.limit = smallest(*limits)

    def _length_of_first(self, count: int) -> int | None:
        """Return the batches of an epoch that has the first `count` batches of each loader."""
        return self.total(min(known_length(loader) or count, count) for loader in self.values())


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
    return smallest(loaders.total(map(known_length, loaders.values())), loaders.limit)


def smallest(*limits: int | None) -> int | None:
    """Return the smallest of several limits, any of which may be None."""
    return min((limit for limit in limits if limit is not None), default=None)


def trusted_length(loader: Iterable[Any]) -> int | None:
    """Return the length of a loader if it can be trusted, otherwise None.

    That is a list's, or a DataLoader's whose sampler counts its own indices. A loader with a state_dict must be read
    to its end, or its state would say that it is still inside the epoch; so its length is not used.
    """
    if has_state(loader):
        return None
    if isinstance(loader, DataLoader):
        plain = type(loader).__len__ is DataLoader.__len__ and type(loader).__iter__ is DataLoader.__iter__
        return known_length(loader) if plain and type(index_sampler(loader)) in _COUNTING_SAMPLERS else None
    return len(loader) if isinstance(loader, Sequence) else None


def raise_no_batches(role: str, name: str, loader: Iterable[Any]) -> NoReturn:
    """Raise TrainingError for one loader of several that yielded no batch."""
    raise TrainingError(f"the {role} loader {name!r} yielded no batch{why_empty({name: loader})}")


def why_empty(loaders: Mapping[str, Iterable[Any]]) -> str:
    """Return the likely reason why loaders yielded no batch, as the end of a sentence."""
    if any(isinstance(loader, Iterator) for loader in loaders.values()):
        return ": it is an iterator, which can be read only once; pass a list or a DataLoader"
    return ": check the dataset and the sampler"
