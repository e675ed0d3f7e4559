"""How several loaders take turns: the declared schedule of a mixture, apart from any loader."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from hookline.errors import ConfigError, nearest
from hookline.trainer.options import TrainerOptions
from hookline.trainer.rng import as_tuples


class Turns(Protocol):
    """Says whose turn comes next, for ever."""

    def take(self) -> int:
        """The index of the loader whose turn it is."""

    def state(self) -> Any:
        """Where it is, as something that can be saved."""

    def go_on(self, state: Any) -> None:
        """Be there again."""


class RoundRobin:
    """One after the other, then again from the first."""

    def __init__(self, count: int) -> None:
        self._count, self._taken = count, 0

    def take(self) -> int:
        """The next in the circle."""
        self._taken += 1
        return (self._taken - 1) % self._count

    def state(self) -> int:
        """Turns taken."""
        return self._taken

    def go_on(self, state: int) -> None:
        """Go on in the circle."""
        self._taken = state


class Weighted:
    """Drawn by weight, from a stream of its own: training's streams do not move, and hooks cannot move it."""

    def __init__(self, weights: Sequence[float], seed: int, epoch: int) -> None:
        self._bounds = list(accumulate(weights))
        # By epoch, so that between two epochs there is nothing to save.
        self._stream = random.Random(f"loaders of epoch {epoch}, seed {seed}")

    def take(self) -> int:
        """The next one drawn."""
        return bisect(self._bounds, self._stream.random() * self._bounds[-1], hi=len(self._bounds) - 1)

    def state(self) -> Any:
        """The stream's."""
        return self._stream.getstate()

    def go_on(self, state: Any) -> None:
        """Go on with the stream."""
        self._stream.setstate(as_tuples(state))


@dataclass(frozen=True)
class Mixing:
    """The options `loader_schedule`, `loader_weights` and `loader_end`, and the seed that the weighted turns use."""

    schedule: str = "sequential"
    weights: Mapping[str, float] | None = None
    end: str = "longest"
    seed: int = 0

    @classmethod
    def of(cls, options: TrainerOptions) -> Mixing:
        """What a run was told; loaders go by texts, also those that a list numbers."""
        weights = options.loader_weights and {str(name): weight for name, weight in options.loader_weights.items()}
        return cls(options.loader_schedule, weights, options.loader_end, options.seed or 0)

    @property
    def one_after_another(self) -> bool:
        return self.schedule == "sequential"

    def check(self, names: Collection[str]) -> None:
        """Weights must be those of the loaders that there are, each of them."""
        for name in self.weights or ():
            if name not in names:
                raise ConfigError(f"trainer.loader_weights.{name}", f"no such loader; {nearest(name, names)}")
        missing = [name for name in names if name not in (self.weights or names)]
        if missing:
            raise ConfigError("trainer.loader_weights", f"no weight for {', '.join(map(repr, missing))}")

    def turns(self, names: Sequence[str], epoch: int) -> Turns:
        """The turns of one epoch."""
        if self.schedule == "round_robin":
            return RoundRobin(len(names))
        weights = self.weights or dict.fromkeys(names, 1.0)
        return Weighted([weights[name] for name in names], self.seed, epoch)

    def is_over(self, ended: Sequence[bool], turn: int) -> bool:
        """Whether an epoch ends before this turn, given which loaders have been read to their end at least once."""
        return all(ended) if self.end == "longest" else ended[turn]

    def length(self, lengths: Sequence[int | None]) -> int | None:
        """Batches of one epoch; None when a loader does not know its length, or the turns are drawn."""
        known = [length for length in lengths if length is not None]
        if len(known) < len(lengths):
            return None
        if self.one_after_another or len(known) < 2:
            return sum(known)
        if self.schedule == "weighted":
            return None
        if self.end == "shortest":  # up to the turn at which the first has nothing left
            return min(length * len(known) + place for place, length in enumerate(known))
        return max((length - 1) * len(known) + place + 1 for place, length in enumerate(known))
