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

    How often hundreds of tensors were written to takes longer to ask than to launch work on them. Who knows that nobody
    else writes need not have it asked: a table that is not `settled` takes its norms for right until it is.
    """

    def __init__(self) -> None:
        self.settled = True
        self._memory: list[Tensor] = []  # held on to, so that no other tensor gets the id of one of these
        self._versions: list[int] = []  # as long as it is settled
        self._found: list[bool] = []  # whether each was found by a link while it wrote, and not read
        self._by_id: dict[int, int] = {}  # places in the row; made when somebody asks for another choice
        self._row: Tensor | None = None
        self._factor: Tensor | None = None  # what the row is to be multiplied by before it is used
        self._handed_out = False  # somebody has the row, which must stay as it is

    def settle(self) -> None:
        """Somebody may write from now on without saying so: note how often each was written to until now."""
        if not self.settled:
            self._versions, self.settled = _versions(self._memory), True

    def stale(self, memory: list[Tensor]) -> list[int]:
        """Which of these have no norm here, or were written to since."""
        if self._row is None:
            return list(range(len(memory)))
        if not self.settled:
            return [] if are_same(self._memory, memory) else self._missing(memory)
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
        if not found or not self.settled:
            return found
        return [self._versions[place] for place in places if place is not None] == _versions(memory)

    def put(self, memory: list[Tensor], norms: Tensor, found: bool = False, settled: bool = True) -> None:
        """Take these norms for those of this memory, as it is now; from now on they are the table's own."""
        if self._row is None or are_same(self._memory, memory):
            self._memory, self._row, self._factor = memory, norms, None
            self._versions, self.settled = _versions(memory) if settled else [], settled
            self._found = [found] * len(memory)
            self._by_id, self._handed_out = {}, False
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

    def put_product(self, memory: list[Tensor], norms: Tensor, factor: Tensor, settled: bool = True) -> None:
        """The same for norms that are to be multiplied by a number; that is done when somebody asks for them.

        Behind the last link nobody does.
        """
        if are_same(self._memory, memory):
            self.put(memory, norms, settled=settled)
            self._factor = factor
        else:
            self.put(memory, norms * factor, settled=settled)

    def row(self, memory: list[Tensor]) -> Tensor:
        """The norms of these, all of which are here."""
        row = self._own_row()
        if not are_same(self._memory, memory):
            return row[kept_table(row.device, tuple(self._places(memory)))]
        self._handed_out = True
        return row

    def _own_row(self) -> Tensor:
        """The row as it is to be used."""
        assert self._row is not None
        if self._factor is not None:
            self._row, self._factor, self._handed_out = self._row * self._factor, None, False
        return self._row

    def _replace(self, places: list[int], memory: list[Tensor], norms: Tensor, found: bool) -> None:
        """In a new row if somebody has the old one."""
        row = self._own_row()
        for place in places:
            self._found[place] = found
        if self.settled:
            for place, version in zip(places, _versions(memory), strict=True):
                self._versions[place] = version
        index, norms = kept_table(row.device, tuple(places)), norms.to(row.dtype)
        self._row = row.index_copy(0, index, norms) if self._handed_out else row.index_copy_(0, index, norms)
        self._handed_out = False

    def _make_room(self, memory: list[Tensor]) -> None:
        """For those that are not in the row, behind it."""
        if new := [memory[i] for i in self._missing(memory)]:
            row, many = self._own_row(), len(self._memory)
            self._known_places().update((id(one), place) for place, one in enumerate(new, many))
            self._memory, self._found = [*self._memory, *new], self._found + [False] * len(new)
            self._versions = [*self._versions, *_versions(new)] if self.settled else []
            self._row, self._handed_out = torch.cat([row, row.new_empty(len(new))]), False

    def _missing(self, memory: list[Tensor]) -> list[int]:
        known = self._known_places()
        return [i for i, one in enumerate(memory) if id(one) not in known]

    def _places(self, memory: list[Tensor]) -> list[int]:
        known = self._known_places()
        return [known[id(one)] for one in memory]

    def _known_places(self) -> dict[int, int]:
        if not self._by_id:
            self._by_id = dict(zip(map(id, self._memory), range(len(self._memory)), strict=True))
        return self._by_id


def _versions(memory: list[Tensor]) -> list[int]:
    return list(map(_VERSION, memory))
