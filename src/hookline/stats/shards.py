"""Tensors cut over the ranks of a mesh (DTensors): from what each rank measured to what the whole ones have.

All tensors of a mesh travel together: one sum and one maximum over the ranks for their rows, one sum for their
histograms. So every rank must ask for the same, at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from hookline.errors import HooklineError
from hookline.stats.layout import upload
from hookline.stats.merging import put_together, take_apart


class Shards:
    """The tensors of one mesh: where they stand among all, and of which of them this rank's piece counts.

    Of the copies that ranks hold of the same piece, the first one counts.
    """

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh
        self._places: list[int] = []
        self._counts: list[bool] = []

    def add(self, place: int, tensor: Any, name: object) -> None:
        """Take in one more tensor."""
        here = zip(tensor.placements, self._mesh.get_coordinate(), strict=True)
        if any(placement.is_partial() for placement in tensor.placements):
            raise HooklineError(f"no statistics of {name}: its parts are still to be added up; redistribute() it first")
        self._places.append(place)
        self._counts.append(all(rank == 0 for placement, rank in here if placement.is_replicate()))

    def rows(self, rows: Tensor) -> Tensor:
        """All rows, with those of these tensors made whole."""
        sums, peaks = take_apart(self._chosen(rows))
        sums, peaks = self._reduce(sums, dist.ReduceOp.SUM, 0.0), self._reduce(peaks, dist.ReduceOp.MAX, float("-inf"))
        return self._put_back(rows, put_together(sums, peaks))

    def sums(self, values: Tensor) -> Tensor:
        """All of what adds up, such as counts and squares, with those of these tensors made whole."""
        return self._put_back(values, self._reduce(self._chosen(values), dist.ReduceOp.SUM, 0))

    def _chosen(self, values: Tensor) -> Tensor:
        return values[upload(self._places, torch.int64, values.device)]

    def _put_back(self, values: Tensor, whole: Tensor) -> Tensor:
        return values.index_copy(0, upload(self._places, torch.int64, values.device), whole)

    def _reduce(self, values: Tensor, operation: Any, neutral: float) -> Tensor:
        if not all(self._counts):
            counts = upload(self._counts, torch.bool, values.device)
            values = torch.where(counts.view(-1, *[1] * (values.dim() - 1)), values, neutral)
        values = values.contiguous()
        for dimension in range(self._mesh.ndim):
            dist.all_reduce(values, operation, group=self._mesh.get_group(dimension))
        return values


def find_shards(tensors: Sequence[Any], names: Sequence[object]) -> list[Shards]:
    """The distributed ones among some tensors, by mesh; meshes that this rank is no part of are left out."""
    found: dict[Any, Shards] = {}
    for place, tensor in enumerate(tensors):
        mesh = tensor.device_mesh if hasattr(type(tensor), "to_local") else None
        if mesh is not None and mesh.get_coordinate() is not None:
            found.setdefault(mesh, Shards(mesh)).add(place, tensor, names[place])
    return list(found.values())
