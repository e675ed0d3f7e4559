"""The norms of gradients of one dtype and device, as one row that stays on the device."""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import Tensor

from hookline.gradients.numbers import are_same
from hookline.stats.layout import kept_table

_VERSION = attrgetter("_version")


class NormTable:
    """A row of norms, with the memory that each is of and how often that had been written to.

    Links mostly ask for the same gradients in the same order, and then the row is what they get. Other choices are
    gathered from it on the device: taking it apart into single norms would cost a tensor for each.
    """

    def __init__(self) -> None:
        self._memory: list[Tensor] = []  # held on to, so that no other tensor gets the id of one of these
        self._versions: list[int] = []
        self._found: list[bool] = []  # whether each was found by a link while it wrote, and not read
        self._by_id: dict[int, int] = {}  # places in the row; made when somebody asks for another choice
        self._row: Tensor | None = None

    def stale(self, memory: list[Tensor]) -> list[int]:
        """Which of these have no norm here, or were written to since."""
        versions = _versions(memory)
        if are_same(self._memory, memory):
            pairs = zip(self._versions, versions, strict=True)
            return [] if versions == self._versions else [i for i, (at, now) in enumerate(pairs) if at != now]
        places = map(self._known_places().get, map(id, memory))
        return [i for i, place in enumerate(places) if place is None or self._versions[place] != versions[i]]

    def were_found(self, memory: list[Tensor]) -> bool:
        """Whether the norms of all of these are here, are right, and were found by a link while it wrote."""
        places = list(map(self._known_places().get, map(id, memory)))
        found = all(place is not None and self._found[place] for place in places)
        return found and [self._versions[place] for place in places if place is not None] == _versions(memory)

    def put(self, memory: list[Tensor], norms: Tensor, found: bool = False) -> None:
        """Take these norms for those of this memory, as it is now."""
        if self._row is None or are_same(self._memory, memory):
            self._memory, self._versions, self._row = memory, _versions(memory), norms
            self._found = [found] * len(memory)
            self._by_id = {}
        else:
            self._make_room(memory)
            self._replace(self._places(memory), memory, norms, found)

    def put_some(self, memory: list[Tensor], chosen: list[int], norms: Tensor) -> None:
        """The same for a few of this memory."""
        some = [memory[i] for i in chosen]
        if are_same(self._memory, memory):
            self._replace(chosen, some, norms, found=False)
        else:
            self.put(some, norms)

    def row(self, memory: list[Tensor]) -> Tensor:
        """The norms of these, all of which are here."""
        assert self._row is not None
        if are_same(self._memory, memory):
            return self._row
        return self._row[kept_table(self._row.device, tuple(self._places(memory)))]

    def _replace(self, places: list[int], memory: list[Tensor], norms: Tensor, found: bool) -> None:
        """In a new row: those that were handed out stay as they are."""
        assert self._row is not None
        for place, version in zip(places, _versions(memory), strict=True):
            self._versions[place], self._found[place] = version, found
        index = kept_table(self._row.device, tuple(places))
        self._row = self._row.index_copy(0, index, norms.to(self._row.dtype))

    def _make_room(self, memory: list[Tensor]) -> None:
        """For those that are not in the row, behind it."""
        assert self._row is not None
        known = self._known_places()
        new = [one for one in memory if id(one) not in known]
        if new:
            known.update((id(one), place) for place, one in enumerate(new, len(self._memory)))
            self._memory, self._versions = [*self._memory, *new], [*self._versions, *_versions(new)]
            self._found += [False] * len(new)
            self._row = torch.cat([self._row, self._row.new_empty(len(new))])

    def _places(self, memory: list[Tensor]) -> list[int]:
        known = self._known_places()
        return [known[id(one)] for one in memory]

    def _known_places(self) -> dict[int, int]:
        if not self._by_id:
            self._by_id = {id(one): place for place, one in enumerate(self._memory)}
        return self._by_id


def _versions(memory: list[Tensor]) -> list[int]:
    return list(map(_VERSION, memory))
