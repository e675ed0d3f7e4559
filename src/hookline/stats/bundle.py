"""Rows of several steps that cross to the host together, as each copy costs the host as much as making the rows."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TOGETHER = 8  # steps; where there are none, so many lots of rows


class Part(NamedTuple):
    """What rows that stand together belong to."""

    step: int
    keys: Sequence[Hashable]


class Tied(tuple[Part, ...]):
    """What the rows of a bundle belong to, in their order."""

    def apart(self, rows: Tensor) -> Iterator[tuple[int, Sequence[Hashable], Tensor]]:
        """Step, keys and rows of each part."""
        first = 0
        for step, keys in self:
            yield step, keys, rows[first : first + len(keys)]
            first += len(keys)


class Bundle:
    """Gathers rows where they are. None waits for others longer than some steps; those of a rare schedule do not."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._rows: list[Tensor] = []
        self._last = 0  # step that rows came for

    def __len__(self) -> int:
        """How many parts there are."""
        return len(self._parts)

    def add(self, step: int, keys: Sequence[Hashable], rows: Tensor) -> bool:
        """Take rows of one step; whether it is time for all of them, as the next will come too late."""
        self._parts.append(Part(step, keys))
        self._rows.append(rows)
        next_step, self._last = 2 * step - self._last, step
        return len(self._parts) >= TOGETHER or next_step - self._parts[0].step >= TOGETHER

    def has_of(self, step: int) -> bool:
        """Whether rows of a step are waiting."""
        return any(part.step == step for part in self._parts)

    def tie_up(self) -> tuple[Tied, Tensor]:
        """All there is, which leaves nothing."""
        parts, rows = self._parts, self._rows
        self._parts, self._rows = [], []
        return Tied(parts), torch.cat(rows) if len(rows) > 1 else rows[0]
