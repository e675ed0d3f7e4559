"""One reading for all who look at the same tensors at the same moment.

Two monitors of one model mostly ask for the same statistics of the same outputs, one right after the other; and a
module that only passes on what another gave has the same output. Each tensor is read once.

What was read is known again by the tensor itself and by how often it has been written to. Writes that no version counts
(through `.data`, into the shard of a DTensor) go unseen, so this is for hooks of one event, with nobody in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_
from threading import local
from weakref import ref

from torch import Tensor

from hookline.stats.columns import L2
from hookline.stats.layout import kept_table
from hookline.stats.statistics import summarize

_VERSION = attrgetter("_version")


def versions_of(tensors: Sequence[Tensor]) -> list[int] | None:
    """How often each was written to; None where an inference tensor is among them."""
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:
        return None


class Known:
    """Some tensors and how often each had been written to, by which they are known again. Keeps none of them alive."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.versions = versions_of(tensors)
        """None where an inference tensor is among them: those cannot be known again."""
        self._refs = list(map(ref, tensors))

    def tensors(self) -> list[Tensor | None]:
        """They, with None for those that are gone."""
        return [one() for one in self._refs]

    def are(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the very same, and none has been written to since, for all that versions tell."""
        same = len(self._refs) == len(tensors) and all(map(is_, self.tensors(), tensors))
        return same and self.versions is not None and versions_of(tensors) == self.versions


class _Newest(local):
    """What a thread has read last: all statistics, or norms alone."""

    def __init__(self) -> None:
        self.known = Known([])
        self.rows: Tensor | None = None
        self.norms: Tensor | None = None


_newest = _Newest()


def summarize_once(tensors: Sequence[Tensor], names: Sequence[object] | None = None) -> Tensor:
    """As `summarize`; what was read at this moment already, or stands here twice, is not read again."""
    rows = recall(tensors)
    if rows is None:
        rows = _each_once(tensors, names)
        remember(Known(tensors), rows)
    return rows


def _each_once(tensors: Sequence[Tensor], names: Sequence[object] | None) -> Tensor:
    firsts: dict[int, int] = {}
    for place, tensor in enumerate(tensors):
        firsts.setdefault(id(tensor), place)
    if len(firsts) == len(tensors):
        return summarize(tensors, names)
    places = firsts.values()
    rows = summarize([tensors[place] for place in places], names and [names[place] for place in places])
    rank = {key: row for row, key in enumerate(firsts)}
    return _chosen(rows, [rank[id(tensor)] for tensor in tensors])


def remember(known: Known, rows: Tensor) -> None:
    """Keep the rows of these tensors until the next ones."""
    _newest.known, _newest.rows, _newest.norms = known, rows, None


def remember_norms(known: Known, norms: Tensor) -> None:
    """Keep the norms of these tensors, of which nothing else was read, until the next ones."""
    _newest.known, _newest.rows, _newest.norms = known, None, norms


def recall_norms(tensors: Sequence[Tensor]) -> Tensor | None:
    """The norms of these tensors, if they or all statistics were read last and nobody has written to them since."""
    if _newest.norms is not None:
        return _newest.norms if _newest.known.are(tensors) else None
    rows = recall(tensors)
    return None if rows is None else rows[:, L2]


def recall(tensors: Sequence[Tensor]) -> Tensor | None:
    """The rows of these tensors, if all are among those read last and none has been written to since."""
    known, rows = _newest.known, _newest.rows
    if rows is None:
        return None
    if known.are(tensors):  # as mostly
        return rows
    if known.versions is None:
        return None
    places = {id(tensor): place for place, tensor in enumerate(known.tensors())}
    chosen = [place for place in map(places.get, map(id, tensors)) if place is not None]
    if len(chosen) < len(tensors) or [known.versions[place] for place in chosen] != versions_of(tensors):
        return None
    return _chosen(rows, chosen)


def _chosen(rows: Tensor, chosen: list[int]) -> Tensor:
    return rows.index_select(0, kept_table(rows.device, tuple(chosen)))
