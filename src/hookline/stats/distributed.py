"""Measure tensors of every kind a model can have: on several devices, sparse, complex, or sharded over ranks (DTensor).

The DTensors of a mesh are reduced together: one sum and one maximum over the ranks for their rows, one sum for their
histograms. Every rank must therefore ask for the same tensors at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from hookline import _device
from hookline._tensors import TensorMeta, indices_by, is_sharded, stored_values, tensor_meta
from hookline.errors import HooklineError
from hookline.stats import histograms, rows
from hookline.stats.rows import COUNT, ZEROS, join_rows, merge, split_rows


class LocalTensors:
    """The dense part of each tensor that this process holds; the methods return what is true of the whole tensors.

    The zeros that a sparse tensor leaves out are counted, and so are the shards of a DTensor on other ranks. Results
    are on the device of the first tensor.

    Args:
        tensors: Any tensors.
        names: The name of each tensor in errors.

    Raises:
        HooklineError: If a DTensor is a partial sum.
    """

    def __init__(self, tensors: Sequence[Tensor], names: Sequence[object] | None = None) -> None:
        self.names = names or [f"tensor {index}" for index in range(len(tensors))]
        self.dense = list(tensors)
        self._left_out: list[int] = []  # zeros that sparse tensors do not store
        self._meshes: list[MeshTensors] = []
        self._meta = tensor_meta(self.dense)
        self.plain = self._meta.plain
        """Whether each tensor is its own dense part."""
        if not self.plain:
            local = list(map(_local, tensors, self.names))
            stored = list(map(stored_values, local))
            self.dense = [torch.view_as_real(part.resolve_conj()) if part.is_complex() else part for part in stored]
            self._left_out = [part.numel() - kept.numel() for part, kept in zip(local, stored, strict=True)]
            self._meshes = group_by_mesh(tensors)
            self._meta = tensor_meta(self.dense)
        several = len(self._meta.devices) > 1
        self._groups = indices_by(attrgetter("device"), self.dense) if several else [list(range(len(tensors)))]

    def with_dense(self, dense: Sequence[Tensor]) -> LocalTensors:
        """Return the same tensors with different values in their dense parts, such as differences."""
        other = copy(self)
        other.dense = list(dense)
        other._meta = tensor_meta(other.dense)
        return other

    def summarize(self) -> Tensor:
        """Return one statistics row per tensor, as `hookline.stats.summarize` does."""
        summary = self._measure(rows.summarize)
        if any(self._left_out):
            zeros = torch.zeros_like(summary)
            zeros[:, COUNT] = zeros[:, ZEROS] = _device.upload(self._left_out, summary.dtype, summary.device)
            summary = merge(torch.stack([summary, zeros]))
        for mesh in self._meshes:
            summary = mesh.rows(summary)
        return summary

    def norms(self) -> Tensor:
        """Return the L2 norm of each tensor."""
        norms = self._measure(rows.norms)
        for mesh in self._meshes:
            norms = mesh.sums(norms.square()).sqrt()
        return norms

    def histograms(self, rows: Tensor) -> histograms.Histograms:
        """Count the values of each tensor; `rows` are what `summarize` returned."""
        tops = histograms.tops_of(rows)

        def count(dense: list[Tensor], indices: list[int]) -> Tensor:
            if len(indices) == len(tops):
                return histograms.count(dense, tops)
            tops_here = tops[_device.upload(indices, torch.int64, tops.device)]
            return histograms.count(dense, tops_here.to(dense[0].device))

        counts = self._each_device(count)
        if any(self._left_out):
            counts[:, histograms.ZERO] += _device.upload(self._left_out, counts.dtype, counts.device)
        for mesh in self._meshes:
            counts = mesh.sums(counts)
        return histograms.Histograms(counts, tops)

    def _measure(self, measure: Callable[[list[Tensor], Sequence[object], TensorMeta | None], Tensor]) -> Tensor:
        meta = self._meta if len(self._groups) == 1 else None
        return self._each_device(lambda dense, group: measure(dense, [self.names[index] for index in group], meta))

    def _each_device(self, measure: Callable[[list[Tensor], list[int]], Tensor]) -> Tensor:
        """Measure the tensors of each device together; return the results on the first one's, in their order."""
        if len(self._groups) == 1:
            return measure(self.dense, self._groups[0])
        home = self.dense[0].device
        parts = [measure([self.dense[index] for index in group], group).to(home) for group in self._groups]
        order = _device.upload([index for group in self._groups for index in group], torch.int64, home)
        joined = torch.cat(parts)
        return torch.empty_like(joined).index_copy_(0, order, joined)


def _local(tensor: Any, name: object) -> Tensor:
    """Return the part of a tensor that this process holds."""
    local: Tensor = tensor.detach()
    if is_sharded(tensor):
        if any(placement.is_partial() for placement in tensor.placements):
            raise HooklineError(f"no statistics of {name}: it is a partial sum over ranks; redistribute() it first")
        local = tensor.detach().to_local()
    return local.coalesce() if local.is_sparse else local  # so that its values are the same tensor object each time


class MeshTensors:
    """The DTensors of one device mesh: their indices among all tensors, and which of them count on this rank.

    If several ranks hold copies of one shard, the first of them counts.
    """

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh
        self.indices: list[int] = []
        self.counts: list[bool] = []

    def rows(self, rows: Tensor) -> Tensor:
        """Return all rows, with those of these tensors merged over the ranks."""
        indices = _device.upload(self.indices, torch.int64, rows.device)
        sums, peaks = split_rows(rows[indices])
        sums, peaks = self._reduce(sums, dist.ReduceOp.SUM, 0.0), self._reduce(peaks, dist.ReduceOp.MAX, float("-inf"))
        return rows.index_copy(0, indices, join_rows(sums, peaks))

    def sums(self, values: Tensor) -> Tensor:
        """Return all values, such as counts and squares, with those of these tensors added up over the ranks."""
        indices = _device.upload(self.indices, torch.int64, values.device)
        return values.index_copy(0, indices, self._reduce(values[indices], dist.ReduceOp.SUM, 0))

    def _reduce(self, values: Tensor, operation: Any, neutral: float) -> Tensor:
        # Each rank takes part in every reduction, because the others would wait otherwise; a copy that does not count
        # adds nothing.
        if not all(self.counts):
            counts = _device.upload(self.counts, torch.bool, values.device)
            values = torch.where(counts.view(-1, *[1] * (values.dim() - 1)), values, neutral)
        values = values.contiguous()  # all_reduce needs it.
        for dimension in range(self._mesh.ndim):
            dist.all_reduce(values, operation, group=self._mesh.get_group(dimension))
        return values


def is_copy(tensor: Any) -> bool:
    """Return whether this rank's part of a DTensor is also held by a lower rank."""
    here = tensor.device_mesh.get_coordinate()
    return here is not None and any(
        rank > 0 for placement, rank in zip(tensor.placements, here, strict=True) if placement.is_replicate()
    )


def group_by_mesh(tensors: Sequence[Any]) -> list[MeshTensors]:
    """Return the DTensors among the tensors by mesh, without meshes that this rank is not part of."""
    by_mesh: dict[Any, MeshTensors] = {}
    for index, tensor in enumerate(tensors):
        mesh = tensor.device_mesh if is_sharded(tensor) else None
        if mesh is not None and mesh.get_coordinate() is not None:
            shards = by_mesh.setdefault(mesh, MeshTensors(mesh))
            shards.indices.append(index)
            shards.counts.append(not is_copy(tensor))
    return list(by_mesh.values())
