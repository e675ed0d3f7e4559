"""Cache the statistics that a thread computed last, for hooks that ask for the same tensors at the same event.

Two monitors of one model mostly want the same statistics of the same outputs, one right after the other, and a module
that returns its input has the same output as the module before it. Each tensor is read once.

A tensor is recognised by its identity and its version. Writes that raise no version (through `.data`, or into the shard
of a DTensor) are missed, so this is for hooks of one event, between which nothing else runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from threading import local
from weakref import ref

from torch import Tensor

from hookline import _device
from hookline.stats.columns import L2
from hookline.stats.rows import summarize


def _versions(tensors: Sequence[Tensor]) -> list[int] | None:
    """Return the version of each tensor, None if one is an inference tensor, which has none."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return None


class TensorVersions:
    """The identities and versions of some tensors; it does not keep them alive."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.versions = _versions(tensors)
        """None if one is an inference tensor: writes to those cannot be noticed."""
        self._refs = list(map(ref, tensors))

    def tensors(self) -> list[Tensor | None]:
        """Return the tensors, None for those that no longer exist."""
        return [reference() for reference in self._refs]

    def matches(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these are the same tensors, in order, and no version has changed."""
        same = len(self._refs) == len(tensors) and all(map(is_, self.tensors(), tensors))
        return same and self.versions is not None and _versions(tensors) == self.versions


class _Cache(local):
    """The last result of a thread: all statistics, or norms alone."""

    snapshot = TensorVersions([])
    rows: Tensor | None = None
    norms: Tensor | None = None


_cache = _Cache()


def summarize_cached(tensors: Sequence[Tensor], names: Sequence[object] | None = None) -> Tensor:
    """Return what `summarize` does, without reading tensors again that were read last, or that are listed twice."""
    rows = cached_rows(tensors)
    if rows is None:
        distinct = {id(tensor): tensor for tensor in tensors}
        if len(distinct) == len(tensors):
            rows = summarize(tensors, names)
        else:
            own = names and list({id(tensor): name for tensor, name in zip(tensors, names, strict=True)}.values())
            row_of = {key: row for row, key in enumerate(distinct)}
            rows = _select(summarize(list(distinct.values()), own), [row_of[id(tensor)] for tensor in tensors])
        cache_rows(TensorVersions(tensors), rows)
    return rows


def cache_rows(snapshot: TensorVersions, rows: Tensor) -> None:
    """Cache the rows of some tensors, in place of what this thread cached before."""
    _cache.snapshot, _cache.rows, _cache.norms = snapshot, rows, None


def cache_norms(snapshot: TensorVersions, norms: Tensor) -> None:
    """Cache the norms of some tensors, in place of what this thread cached before."""
    _cache.snapshot, _cache.rows, _cache.norms = snapshot, None, norms


def cached_norms(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the norms of these tensors if they are in the cache and no tensor was written to since."""
    if _cache.norms is not None:
        return _cache.norms if _cache.snapshot.matches(tensors) else None
    rows = cached_rows(tensors)
    return None if rows is None else rows[:, L2]


def cached_rows(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the rows of these tensors if all are in the cache, in any order, and none was written to since."""
    snapshot, rows = _cache.snapshot, _cache.rows
    if rows is None or snapshot.versions is None:
        return None
    if snapshot.matches(tensors):  # the usual case
        return rows
    index_of = {id(tensor): index for index, tensor in enumerate(snapshot.tensors())}
    found = [index for index in map(index_of.get, map(id, tensors)) if index is not None]
    if len(found) < len(tensors) or [snapshot.versions[index] for index in found] != _versions(tensors):
        return None
    return _select(rows, found)


def _select(rows: Tensor, indices: list[int]) -> Tensor:
    return rows.index_select(0, _device.cached_table(rows.device, tuple(indices)))
