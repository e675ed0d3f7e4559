"""Measure the gradients of one step on their device, as one table that is copied to the host at once."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from hookline._device import upload
from hookline.stats.cache import Snapshot, cache_norms, cache_rows
from hookline.stats.columns import STATISTICS
from hookline.stats.distributed import LocalTensors
from hookline.stats.histograms import fold, percentiles


class SnapshotSpec(NamedTuple):
    """What to measure beside the norms."""

    moments: bool = True
    bins_per_octave: int = 0  # 0 for no histogram
    points: tuple[float, ...] = ()  # percentiles
    update_ratio: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the gradients' statistics; the bins of a histogram have no names and come after them."""
        points = [percentile_name(point) for point in self.points]
        top = ["top_octave"] if self.bins_per_octave else []
        return (*(STATISTICS if self.needs_statistics else ("l2",)), *points, *top)

    @property
    def needs_statistics(self) -> bool:
        """Whether more than norms is needed; a histogram's range ends at the largest value."""
        return self.moments or bool(self.bins_per_octave) or bool(self.points)


def percentile_name(point: float) -> str:
    """Return a percentile's column name: p10, p99.9."""
    return f"p{point:g}"


class TableLayout(NamedTuple):
    """The rows and columns of a snapshot's table.

    The column ``final_l2`` is there only if the gradients changed before the optimizers used them.
    """

    names: tuple[str, ...]
    present: tuple[int, ...]
    """The rows whose parameters have a gradient."""
    columns: tuple[str, ...]


class GradientSnapshot:
    """The gradients of some parameters in one step; rows of parameters without a gradient are NaN.

    Args:
        step: The step they belong to.
        params: The parameters by name.
        spec: What to measure.
        versions_are_reliable: Whether every write to the gradients until the optimizer steps increments the tensors'
            versions, so that unchanged versions mean unchanged gradients.
    """

    def __init__(
        self,
        step: int,
        params: Mapping[str, torch.nn.Parameter],
        spec: SnapshotSpec,
        versions_are_reliable: bool = True,
    ) -> None:
        self.step, self.params, self._spec = step, params, spec
        self._present, grads = self._gradients()
        names = list(params)
        pieces = LocalTensors(grads, names if len(grads) == len(names) else [names[row] for row in self._present])
        # A DTensor's version misses writes to its shard, so only plain gradients can be recognised as unchanged.
        read = Snapshot(grads) if pieces.plain else None
        self._measured = self._measure(pieces, read)
        self._read = read if versions_are_reliable else None
        self._is_unchanged = False  # the optimizers got what was measured
        self._final: Tensor | None = None
        self._sizes: Tensor | None = None
        # The parameters that are about to be updated: their rows, themselves, their norms and a copy of them.
        self._update: tuple[list[int], LocalTensors, Tensor, list[Tensor]] | None = None

    def measure_final(self) -> None:
        """Measure what the optimizers get; gradients that are known to be unchanged are not read again."""
        if self._final is None and not self._is_unchanged:
            rows, grads = self._gradients()
            self._is_unchanged = self._read is not None and self._read.matches(grads)
            if not self._is_unchanged:
                self._final = self._spread(LocalTensors(grads).norms().unsqueeze(1), rows, missing=0.0)

    @torch.no_grad()
    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the parameters that an optimizer is about to update."""
        owned = {id(param) for group in optimizer.param_groups for param in group["params"]}
        params = list(self.params.values())
        rows = [row for row in self._present if id(params[row]) in owned]
        self._update = None  # the step of the optimizer before may have been skipped
        if rows:
            pieces = LocalTensors([params[row] for row in rows])
            copies = torch._foreach_mul(pieces.dense, 1)  # copies all of them in a few launches
            self._update = rows, pieces, pieces.norms(), list(copies)

    @torch.no_grad()
    def after_step(self) -> None:
        """Measure how far the optimizer moved them, and how large they were."""
        if self._update is not None:
            rows, pieces, weights, before = self._update
            torch._foreach_sub_(before, pieces.dense)
            found = self._spread(torch.stack([pieces.with_dense(before).norms(), weights], dim=1), rows)
            # Another optimizer may have measured other rows before.
            self._sizes = found if self._sizes is None else torch.where(found.isnan(), self._sizes, found)
            self._update = None

    def table(self) -> tuple[TableLayout, Tensor]:
        """Return everything that was measured, [parameters, columns and bins], and what rows and columns are."""
        blocks: dict[tuple[str, ...], Tensor | None] = {}
        if not self._is_unchanged:
            blocks["final_l2",] = self._final
        if self._spec.update_ratio:
            blocks["update_l2", "weight_l2"] = self._sizes
        columns = (*chain.from_iterable(blocks), *self._spec.columns)
        found = [
            self._measured.new_full((len(self.params), len(names)), float("nan")) if block is None else block
            for names, block in blocks.items()
        ]
        table = torch.cat([*found, self._measured], dim=1) if found else self._measured
        return TableLayout(tuple(self.params), tuple(self._present), columns), table

    def _gradients(self) -> tuple[list[int], list[Tensor]]:
        """Return the rows that have a gradient, and these gradients."""
        grads = [param.grad for param in self.params.values()]
        rows = [row for row, grad in enumerate(grads) if grad is not None]
        return rows, [grad for grad in grads if grad is not None]

    def _measure(self, pieces: LocalTensors, read: Snapshot | None) -> Tensor:
        """Return norms or statistics, then percentiles, the octave at which the bins end, and the bins."""
        # Norms alone are cheaper than all statistics, except on a device.
        if not self._spec.needs_statistics:
            norms = pieces.norms()
            if read is not None:
                cache_norms(read, norms)  # for the next reader of these gradients
            return self._spread(norms.unsqueeze(1), self._present)
        blocks = [rows := pieces.summarize()]
        if read is not None:
            cache_rows(read, rows)
        points, bins_per_octave = self._spec.points, self._spec.bins_per_octave
        if not (points or bins_per_octave):
            return self._spread(rows, self._present)
        counted = pieces.histograms(rows)
        blocks += [percentiles(counted, points)] if points else []
        blocks += [counted.tops.unsqueeze(1), fold(counted.counts, bins_per_octave)] if bins_per_octave else []
        return self._spread(torch.cat([block.to(rows.dtype) for block in blocks], dim=1), self._present)

    def _spread(self, found: Tensor, rows: list[int], missing: float = float("nan")) -> Tensor:
        """Put the values of some parameters into a table with a row for each parameter."""
        if len(rows) == len(self.params):
            return found
        table = found.new_full((len(self.params), found.shape[1]), missing)
        return table.index_copy_(0, upload(rows, torch.int64, found.device), found)
