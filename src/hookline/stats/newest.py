"""One reading for all who look at the same tensors at the same moment.

Two monitors of one model mostly ask for the same statistics of the same outputs, one right after the other; and a
module that only passes on what another gave has the same output. Each tensor is read once.

What was read is known again by the tensor itself and by how often it has been written to. Writes that no version counts
(through `.data`, into the shard of a DTensor) go unseen, so this is for hooks of one event, with nobody in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import local
from weakref import ref

import torch
from torch import Tensor

from hookline.stats.layout import kept_table
from hookline.stats.statistics import summarize


class _Newest(local):
    """What a thread has read last. It keeps no tensor alive but the rows."""

    def __init__(self) -> None:
        self.rows: Tensor | None = None
        self.places: dict[int, tuple[int, int, ref[Tensor]]] = {}  # by id: the row, the version, and whose id it was


_newest = _Newest()


def summarize_once(tensors: Sequence[Tensor], names: Sequence[object] | None = None) -> Tensor:
    """As `summarize`; what was read at this moment already, or stands here twice, is not read again."""
    known = recall(tensors)
    if known is not None:
        return known
    firsts = {id(tensor): place for place, tensor in reversed(list(enumerate(tensors)))}
    if len(firsts) == len(tensors):
        remember(tensors, rows := summarize(tensors, names))
        return rows
    single = sorted(firsts.values())
    own = [tensors[place] for place in single]
    remember(own, rows := summarize(own, names and [names[place] for place in single]))
    rank = {place: row for row, place in enumerate(single)}
    return _chosen(rows, [rank[firsts[id(tensor)]] for tensor in tensors])


def remember(tensors: Sequence[Tensor], rows: Tensor) -> None:
    """Keep the rows of these tensors until the next ones; not of inference tensors, which have no version."""
    counted = not any(map(torch.Tensor.is_inference, tensors))
    _newest.rows = rows if counted else None
    _newest.places = {id(one): (row, one._version, ref(one)) for row, one in enumerate(tensors)} if counted else {}


def recall(tensors: Sequence[Tensor]) -> Tensor | None:
    """The rows of these tensors, if all are among those read last and none has been written to since."""
    chosen = [row for row in map(_row, tensors) if row is not None]
    return None if _newest.rows is None or len(chosen) < len(tensors) else _chosen(_newest.rows, chosen)


def _row(tensor: Tensor) -> int | None:
    row, version, whose = _newest.places.get(id(tensor), (None, 0, None))
    return row if whose is not None and whose() is tensor and version == tensor._version else None


def _chosen(rows: Tensor, chosen: list[int]) -> Tensor:
    return rows if chosen == list(range(len(rows))) else rows[kept_table(rows.device, tuple(chosen))]
