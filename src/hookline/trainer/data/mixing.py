"""Decide from which of several training loaders the next batch comes (the option `loader_schedule`)."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from hookline._words import nearest
from hookline.core.rng_guard import as_tuples
from hookline.errors import ConfigError
from hookline.trainer.options import TrainerOptions


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

    Drawing does not move training's streams, nor do hooks move this one.
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
        self._generator.setstate(as_tuples(state))


@dataclass(frozen=True)
class LoaderSchedule:
    """The options `loader_schedule`, `loader_weights` and `loader_end`, and the seed for weighted drawing."""

    kind: str = "sequential"
    weights: Mapping[str, float] | None = None
    end: str = "longest"
    seed: int = 0

    @classmethod
    def from_options(cls, options: TrainerOptions) -> LoaderSchedule:
        """Read the options of a run; loader names are strings, also those of a list of loaders."""
        weights = options.loader_weights and {str(name): weight for name, weight in options.loader_weights.items()}
        return cls(options.loader_schedule, weights, options.loader_end, options.seed or 0)

    @property
    def sequential(self) -> bool:
        """Whether each loader is read to its end before the next one."""
        return self.kind == "sequential"

    def check(self, names: Collection[str]) -> None:
        """Raise ConfigError unless the weights, if any, are those of the given loaders."""
        for name in self.weights or ():
            if name not in names:
                raise ConfigError(f"trainer.loader_weights.{name}", f"no such loader; {nearest(name, names)}")
        missing = [name for name in names if name not in (self.weights or names)]
        if missing:
            raise ConfigError("trainer.loader_weights", f"no weight for {', '.join(map(repr, missing))}")

    def order(self, names: Sequence[str], epoch: int) -> RoundRobin | Weighted:
        """Return the order in which one epoch reads the loaders."""
        if self.kind == "round_robin":
            return RoundRobin(len(names))
        weights = self.weights or dict.fromkeys(names, 1.0)
        return Weighted([weights[name] for name in names], self.seed, epoch)

    def length(self, lengths: Sequence[int | None]) -> int | None:
        """Return the batches of one epoch; None if a length is unknown or the loaders are drawn."""
        known = [length for length in lengths if length is not None]
        if len(known) < len(lengths):
            return None
        if self.sequential or len(known) < 2:
            return sum(known)
        if self.kind == "weighted":
            return None
        if self.end == "shortest":  # up to the batch at which the first loader has none left
            return min(length * len(known) + index for index, length in enumerate(known))
        return max((length - 1) * len(known) + index + 1 for index, length in enumerate(known))
