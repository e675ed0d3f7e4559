"""Statistics of tensors of every kind that a model can have: on several devices, sparse, complex, or sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from hookline.stats import histograms, norms, statistics
from hookline.stats.columns import COUNT, ZEROS
from hookline.stats.kinds import Kinds, kinds_of
from hookline.stats.layout import upload
from hookline.stats.merging import merge
from hookline.stats.shards import Shards, find_shards


class Pieces:
    """What this process holds of some tensors, as `dense` ones; what the methods give is of the whole tensors.

    The zeros that a sparse tensor leaves out are counted, and of a DTensor the pieces of all ranks: they must ask
    together. Everything is on the device of the first tensor.
    """

    def __init__(self, tensors: Sequence[Tensor], names: Sequence[object] | None = None) -> None:
        self.names = names or [f"tensor {index}" for index in range(len(tensors))]
        self.dense = list(tensors)
        self._zeros: list[int] = []
        self._shards: list[Shards] = []
        self._kinds = kinds_of(self.dense)
        self.plain = self._kinds.plain
        """Whether the tensors are their own pieces."""
        if not self.plain:
            local = [_local(tensor) for tensor in tensors]
            self.dense = [_dense(tensor) for tensor in local]
            self._zeros = [_left_out(tensor) for tensor in local]
            self._shards = find_shards(tensors, self.names)
            self._kinds = kinds_of(self.dense)
        self._groups = [list(range(len(tensors)))] if self._kinds.alike else _by_device(self.dense)

    def with_dense(self, dense: Sequence[Tensor]) -> Pieces:
        """The same tensors with other numbers in the pieces, such as their differences to something."""
        other = copy(self)
        other.dense = list(dense)
        other._kinds = kinds_of(other.dense)
        return other

    def summarize(self) -> Tensor:
        """One row per tensor, as `hookline.stats.statistics.summarize` gives it."""
        rows = self._each_device(lambda dense, places: statistics.summarize(dense, self._named(places), self._known()))
        if any(self._zeros):
            zeros = torch.zeros_like(rows)
            zeros[:, COUNT] = zeros[:, ZEROS] = upload(self._zeros, rows.dtype, rows.device)
            rows = merge(torch.stack([rows, zeros]))
        for shards in self._shards:
            rows = shards.rows(rows)
        return rows

    def norms(self) -> Tensor:
        """The L2 norm of each tensor."""
        found = self._each_device(lambda dense, places: norms.norms(dense, self._named(places), self._known()))
        for shards in self._shards:
            found = shards.sums(found.square()).sqrt()
        return found

    def histograms(self, rows: Tensor) -> histograms.Histograms:
        """The values of each tensor counted, as in `hookline.stats.histograms`; `rows` are what `summarize` gave."""
        tops = histograms.tops_of(rows)
        counts = self._each_device(lambda dense, places: histograms.count(dense, _at(tops, places, dense)))
        if any(self._zeros):
            counts[:, histograms.ZERO] += upload(self._zeros, counts.dtype, counts.device)
        for shards in self._shards:
            counts = shards.sums(counts)
        return histograms.Histograms(counts, tops)

    def _known(self) -> Kinds | None:
        """The kinds of the tensors that are measured together, where they are all."""
        return self._kinds if len(self._groups) == 1 else None

    def _named(self, places: list[int]) -> Sequence[object]:
        return self.names if len(places) == len(self.names) else [self.names[place] for place in places]

    def _each_device(self, measure: Callable[[list[Tensor], list[int]], Tensor]) -> Tensor:
        """Measure the tensors of each device together, and bring what was found to the first one's, in their order."""
        if len(self._groups) == 1:
            return measure(self.dense, self._groups[0])
        home = self.dense[0].device
        parts = [measure([self.dense[place] for place in places], places).to(home) for places in self._groups]
        order = upload([place for places in self._groups for place in places], torch.int64, home)
        found = torch.cat(parts)
        return torch.empty_like(found).index_copy_(0, order, found)


def _by_device(tensors: list[Tensor]) -> list[list[int]]:
    """The places of each device's tensors; one empty group for no tensors."""
    if len({tensor.device for tensor in tensors}) <= 1:
        return [list(range(len(tensors)))]
    groups: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault(tensor.device, []).append(place)
    return list(groups.values())


def _local(tensor: Tensor) -> Tensor:
    """The piece that is here."""
    held: Any = tensor.detach()
    piece: Tensor = held.to_local() if hasattr(held, "to_local") else held
    return piece.coalesce() if piece.is_sparse else piece


def _dense(tensor: Tensor) -> Tensor:
    dense = tensor.values() if tensor.is_sparse else tensor
    return torch.view_as_real(dense) if dense.is_complex() else dense


def _left_out(tensor: Tensor) -> int:
    """How many zeros a sparse tensor does not hold."""
    return tensor.numel() - tensor.values().numel() if tensor.is_sparse else 0


def _at(tops: Tensor, places: list[int], dense: list[Tensor]) -> Tensor:
    """The tops of some tensors, on their device."""
    if len(places) == len(tops):
        return tops
    return tops[upload(places, torch.int64, tops.device)].to(dense[0].device)
