"""`gradient_monitor`: record every layer's gradient, and report those that vanish, explode or never arrive."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import mul
from typing import Annotated, NamedTuple, cast

import torch
from annotated_types import Gt, Lt
from torch import Tensor

from hookline._console import logger
from hookline._device import cached_table, upload
from hookline._parameters import Percentage
from hookline._tensors import TensorVersions
from hookline._words import nearest
from hookline.core.schedule import Quantity, Schedule
from hookline.errors import ConfigError, NothingMatches, got
from hookline.gradients.gradient_flow import (
    VERDICT_METRICS,
    GradientFlow,
    Limits,
    Verdict,
    judge_norms,
    params_of_step,
)
from hookline.hooks.base import NamedHook, period
from hookline.run.control import RunControl
from hookline.stats.collector import HostQueue, StepRows
from hookline.stats.distributed import LocalTensors
from hookline.stats.histograms import fold, percentiles
from hookline.stats.rows import STATISTICS

# A GradScaler halves its scale at each overflow; from where it starts, 65536, that may happen 16 times in a row.
MAX_OVERFLOWS = 16
PREFIX = "gradients"
MOMENTS = ("mean", "std", "min", "max", "absmax", "zeros", "nans", "infs")
# Events between the snapshot and the optimizer step at which a hook may write to gradients.
WRITING_EVENTS = {"on_gradients_ready", "on_update", "on_gradient_clip", "on_before_optimizer_step"}
Columns = Mapping[str, Sequence[float]]


class SnapshotSpec(NamedTuple):
    """The statistics to measure besides the norms."""

    moments: bool
    bins_per_octave: int  # 0 for no histogram
    points: tuple[float, ...]  # percentiles
    update_ratio: bool


class TableKeys(NamedTuple):
    """The rows and columns of a snapshot's table, without the bins of a histogram, which come last."""

    names: tuple[str, ...]
    present: tuple[int, ...]
    """The rows whose parameters have a gradient."""
    columns: tuple[str, ...]


class GradientMonitor(NamedHook):
    """Records norms, statistics, percentiles and histograms of every layer's gradient, and reports layers in trouble.

    The gradients are measured when they are complete, unscaled and not yet clipped, and once more before the optimizer
    steps if they changed. All parameters are measured in one pass on their device; the values arrive later, under the
    step they belong to, and nothing waits for them.

    Values per layer, in the model's order, go to layers.jsonl as the series ``gradients`` and ``gradient_histograms``.
    Totals go to metrics.jsonl as ``gradients/…``. events.jsonl names each layer whose gradients vanish, explode, are
    not finite or never arrive, once when that starts and once when it ends. Steps that a GradScaler skips while it
    searches for its scale do not count.

    Args:
        log_frequency: How often to measure: a number of steps, or a period such as "1 epochs";
            an alternative to `every`.
        log_histogram: Record histograms.
        log_norm: Record norms.
        param_filter: Substrings of parameter names; only parameters that contain one are measured.
        percentiles: Percentiles of the signed gradient to record, such as ``[10, 50, 90]``.
        bins_per_octave: Resolution of the histograms: 1, 2, 4 or 8.
        log_moments: Record means, extremes and counts of zeros, NaN and infinities. By default only where they are
            free: on a GPU, and together with histograms or percentiles. On the CPU, reading them takes three times as
            long as reading norms.
        log_update_ratio: Record the size of each update relative to its parameter.
        vanishing: A norm below this is in trouble.
        exploding: A norm above this is in trouble.
        median_ratio: A norm below this share of the median norm, or above its inverse, is in trouble.
        every: How often to measure: 100 steps, "30 s", "1 epoch".

    Raises:
        ConfigError: If a parameter has an invalid value.
    """

    built_in = True
    name = "gradient_monitor"
    needs = ("has_unscaled_gradients",)
    same_on_all_ranks = True  # gradients are the same on all ranks; of a sharded model, all must measure
    every_aliases = ("log_frequency",)
    saves = ("troubled",)
    # Trouble is reported as soon as the values arrive, not at the next step that is due. Without a device they have
    # arrived at the end of the step.
    events_when_not_due = ("on_step_end",) if torch.version.cuda or torch.version.hip else ()

    def __init__(
        self,
        log_frequency: int | str = 100,
        log_histogram: bool = False,
        log_norm: bool = True,
        param_filter: str | Sequence[str] | None = None,
        percentiles: Sequence[Percentage] | None = (),
        bins_per_octave: int = 8,
        log_moments: bool | None = None,
        log_update_ratio: bool = False,
        vanishing: float = 1e-7,
        exploding: float = 1e3,
        median_ratio: Annotated[float, Gt(0), Lt(1)] = 1e-4,
        every: int | str | None = None,
    ) -> None:
        self.log_frequency, self.log_norm, self.log_moments = log_frequency, log_norm, log_moments
        self.param_filter = parts = [param_filter] if isinstance(param_filter, str) else param_filter
        are_parts = isinstance(parts, (list, tuple)) and all(isinstance(part, str) for part in parts)
        if parts is not None and not are_parts:
            message = f"expected a substring of parameter names or a list of substrings, {got(param_filter)}"
            raise ConfigError("param_filter", message)
        frequency = period(self, every) or Quantity.parse(log_frequency, "log_frequency")
        if frequency.amount <= 0:
            raise ConfigError("log_frequency", f"{log_frequency!r} is never due; the minimum is 1")
        self.schedule = Schedule.parse(every=frequency)
        if log_histogram and bins_per_octave not in (1, 2, 4, 8):
            raise ConfigError("bins_per_octave", f"expected 1, 2, 4 or 8, {got(bins_per_octave)}")
        bins = bins_per_octave if log_histogram else 0
        points = tuple(percentiles or ())
        are_free = bool(bins or points or not log_norm)
        self._spec = SnapshotSpec(are_free if log_moments is None else log_moments, bins, points, log_update_ratio)
        self._limits = Limits(vanishing, exploding, median_ratio)
        self.troubled: dict[str, Verdict] = {}
        """The layers that are in trouble according to the newest values that have arrived."""
        self._newest: tuple[Mapping[str, torch.nn.Parameter], TableKeys, Sequence[float]] | None = None
        self._warned: set[tuple[str, Verdict]] = set()
        self._snapshot: GradientSnapshot | None = None
        self._overflowed: set[int] = set()  # steps that the GradScaler skipped and whose values have not arrived
        self._overflows_in_a_row = 0
        self._flush = HostQueue()
        if not log_update_ratio:
            self.on_after_optimizer_step = None  # type: ignore[assignment] # not needed, so not listened to

    @property
    def _prefix(self) -> str:
        """The prefix of metrics; a second monitor uses its own name, or it would overwrite the metrics of the first."""
        return PREFIX if self.registered_name == self.name else f"{PREFIX}/{self.registered_name}"

    def close(self) -> None:
        """Drop values that have not arrived."""
        self._snapshot, self._flush, self._overflowed = None, HostQueue(), set()

    # ---- measuring ---------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: RunControl) -> None:
        """Before the first step, reject a filter that matches nothing."""
        self._select_params(trainer)

    def on_gradients_ready(self, trainer: RunControl, step: int) -> None:
        """Measure the gradients before the update chain."""
        params = params_of_step(trainer, self._select_params(trainer))
        first = next(iter(params.values()), None)
        spec = self._spec
        if first is not None and not first.is_cpu:
            # On a device one launch computes all statistics, so moments cost nothing there.
            spec = spec._replace(moments=self.log_moments is not False)
        # Unlike built-in hooks, users' hooks may write to gradients without giving them a new version.
        users = [entry for entry in trainer.hooks.entries() if entry.enabled and not entry.built_in]
        are_versions_reliable = all(WRITING_EVENTS.isdisjoint(entry.listeners) for entry in users)
        self._snapshot = GradientSnapshot(step, params, spec, are_versions_reliable)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Measure the chain's result, and copy the parameters if the update ratio is wanted."""
        if self._snapshot is not None:
            self._snapshot.measure_final()
            if self._spec.update_ratio:
                self._snapshot.before_step(optimizer)

    def on_after_optimizer_step(self) -> None:
        """Measure how far the parameters have moved."""
        if self._snapshot is not None:
            self._snapshot.after_step()

    def on_step_skipped(self, trainer: RunControl) -> None:
        """Remember which steps the GradScaler skipped."""
        if self._snapshot is not None and trainer.gradients_overflowed:
            self._overflowed.add(self._snapshot.step)

    def on_step_end(self, trainer: RunControl) -> None:
        """Start copying the measurements, and record those that have arrived."""
        if self._snapshot is not None:
            self._flush.send(self._snapshot.step, *self._snapshot.table())
            self._snapshot = None
        if self._flush:
            self._record(self._flush.ready(), trainer)

    def on_epoch_end(self, trainer: RunControl) -> None:
        """Record everything in the epoch it belongs to; the loop waits for the device here anyway."""
        self._record(self._flush.ready(wait=True), trainer)

    on_train_end = on_epoch_end

    def _select_params(self, trainer: RunControl) -> Mapping[str, torch.nn.Parameter]:
        """Return the trained parameters that pass the filter, in the model's order."""
        parts = self.param_filter
        trained = {name: param for name, param in trainer.params.items() if param.requires_grad}
        if not parts:
            return trained
        for part in parts:
            if not any(part in name for name in trainer.params):
                message = f"no parameter's name contains {part!r}; {nearest(part, trainer.params)}"
                raise NothingMatches("gradient_monitor.param_filter", message)
        return {name: param for name, param in trained.items() if any(part in name for part in parts)}

    # ---- recording ---------------------------------------------------------------------------------------------------

    def _record(self, arrivals: Iterable[StepRows], trainer: RunControl) -> None:
        for step, row_keys, table in arrivals:
            names, present, named = keys = cast("TableKeys", row_keys)
            self._log_layers(keys, table, trainer, step)
            if self._spec.bins_per_octave:
                counts = table[:, len(named) :].nan_to_num()  # NaN where there was no gradient: nothing was counted
                trainer.log_layers("gradient_histograms", names, ("count",), counts.unsqueeze(1), step)
            columns = _columns(named, table, present)
            self._log_totals(columns, trainer, step)
            # Steps that the GradScaler skipped while it may still be searching for its scale are not judged.
            self._overflows_in_a_row = self._overflows_in_a_row + 1 if step in self._overflowed else 0
            self._overflowed.discard(step)
            if not 0 < self._overflows_in_a_row <= MAX_OVERFLOWS:
                self._newest = trainer.params, keys, columns["l2"]
                self._judge(keys, columns["l2"], trainer, step)

    def _log_layers(self, keys: TableKeys, table: Tensor, trainer: RunControl, step: int) -> None:
        """Log the columns of layers.jsonl; each comes from a column of the table, which may have a different name."""
        spec, named = self._spec, keys.columns
        sources = {"norm": "l2", "final_norm": "final_l2" if "final_l2" in named else "l2"} if self.log_norm else {}
        sources |= {name: name for name in MOMENTS if name in named and self.log_moments is not False}
        sources |= {"update_ratio": "update_l2"} if spec.update_ratio else {}
        sources |= {name: name for name in map(_percentile_name, spec.points)}
        sources |= {"top_octave": "top_octave"} if spec.bins_per_octave else {}
        if sources:
            indices = tuple([named.index(column) for column in sources.values()])
            values = table.index_select(1, cached_table(table.device, indices))
            if spec.update_ratio:
                values[:, list(sources).index("update_ratio")] /= table[:, named.index("weight_l2")]
            trainer.log_layers("gradients", keys.names, tuple(sources), values, step)

    def _log_totals(self, columns: Columns, trainer: RunControl, step: int) -> None:
        """Log the totals over all measured layers."""
        norms = columns["l2"]
        totals: dict[str, float] = {}
        if self.log_norm and norms:
            total = _total(norms)
            totals |= {"norm": total, "final_norm": _total(columns.get("final_l2", norms))}
            largest, smallest = (math.nan, math.nan) if math.isnan(total) else (max(norms), min(norms))
            totals |= {"largest_norm": largest, "smallest_norm": smallest}
        if "zeros" in columns and self.log_moments is not False:
            totals |= {name: sum(columns[name]) for name in ("zeros", "nans", "infs")}
        if self._spec.update_ratio:
            # The parameters of an optimizer that was skipped are left out.
            moved = [row for row, update in enumerate(columns["update_l2"]) if not math.isnan(update)]
            updates, weights = (_total([columns[name][row] for row in moved]) for name in ("update_l2", "weight_l2"))
            totals["update_ratio"] = updates / weights if weights else math.inf if updates else math.nan
        for name, value in totals.items():
            trainer.log(f"{self._prefix}/{name}", value, step, reduce=None)

    # ---- judging -----------------------------------------------------------------------------------------------------

    @property
    def latest(self) -> GradientFlow | None:
        """The verdict on every layer from the newest values that have arrived; prints as a table."""
        if self._newest is None:
            return None
        params, (names, present, _), norms = self._newest
        known = {name: params[name] for name in names if name in params}
        return judge_norms(known, dict(zip([names[row] for row in present], norms, strict=True)), self._limits)

    def _judge(self, keys: TableKeys, norms: Sequence[float], trainer: RunControl, step: int) -> None:
        """Log how many layers are in trouble, and report where trouble starts or ends."""
        is_healthy = len(norms) == len(keys.names) and self._limits.allow(norms)
        # A verdict on each layer takes longer than the measurement, so it is skipped for a healthy model.
        flow = None if is_healthy and not self.troubled else self.latest
        for key, verdict in VERDICT_METRICS.items():
            count = float(len(flow.of(verdict))) if flow else 0.0
            trainer.log(f"{self._prefix}/layers_{key}", count, step, reduce=None)
        if flow is None:
            return
        new = {name: verdict for name, verdict in flow.troubled.items() if self.troubled.get(name) != verdict}
        over = [name for name in self.troubled if name not in flow.troubled]
        self.troubled = flow.troubled
        if new or over:
            self.note(trainer, "gradient_flow", measured_at=step, verdict=flow.verdict, parameters=new, over=over)
        # The record has every change; the log warns of each once, because a layer may change at every step.
        if not self._warned.issuperset(new.items()):
            logger.warning("step %d: %s", step, flow.verdict)
        self._warned.update(new.items())


def _columns(named: Sequence[str], table: Tensor, present: Sequence[int]) -> Columns:
    """Return the named columns, without the bins, of the gradients that are present.

    These are Python numbers, because an occasional operation on a small tensor takes longer than adding them up.
    """
    columns = table[:, : len(named)].t()
    if len(present) < len(table):
        columns = columns[:, list(present)]
    return dict(zip(named, columns.tolist(), strict=True))


def _total(norms: Sequence[float]) -> float:
    """Return the norm of several tensors together from the norm of each."""
    return math.sqrt(sum(map(mul, norms, norms)))


def _percentile_name(point: float) -> str:
    return f"p{point:g}"


# ---- one step --------------------------------------------------------------------------------------------------------


class GradientSnapshot:
    """The gradients of given parameters in one step, measured on their device as one table that is copied at once.

    Args:
        step: The step they belong to.
        params: The parameters by name; the row of one without a gradient is NaN.
        spec: The statistics to measure.
        versions_are_reliable: Whether every write to the gradients until the optimizer steps increments the tensors'
            versions, so that unchanged versions mean unchanged gradients.
    """

    def __init__(
        self, step: int, params: Mapping[str, torch.nn.Parameter], spec: SnapshotSpec, versions_are_reliable: bool
    ) -> None:
        self.step, self.params, self._spec = step, params, spec
        self._present, grads = self._gradients()
        names = list(params)
        pieces = LocalTensors(grads, [names[row] for row in self._present])
        # A DTensor's version misses writes to its shard, so only plain gradients can be recognized as unchanged.
        self._read = TensorVersions(grads) if pieces.plain and versions_are_reliable else None
        self._columns, values = self._measure(pieces)
        self._measured = self._spread(values, self._present)
        self._is_unchanged = False  # the optimizers got the measured gradients
        self._final: Tensor | None = None
        self._sizes: Tensor | None = None
        # The parameters that are about to be updated: their rows, themselves, their norms and a copy of them.
        self._update: tuple[list[int], LocalTensors, Tensor, list[Tensor]] | None = None

    def _measure(self, pieces: LocalTensors) -> tuple[list[str], Tensor]:
        """Return norms or statistics, then percentiles, the octave at which the bins end, and the bins."""
        moments, bins_per_octave, points, _ = self._spec
        # Norms alone are cheaper than all statistics, except on a device. A histogram ends at the largest value.
        if not (moments or bins_per_octave or points):
            return ["l2"], pieces.norms().unsqueeze(1)
        columns, blocks = [*STATISTICS], [rows := pieces.summarize()]
        if points or bins_per_octave:
            counted = pieces.histograms(rows)
            if points:
                columns += map(_percentile_name, points)
                blocks.append(percentiles(counted, points))
            if bins_per_octave:
                columns.append("top_octave")
                blocks += [counted.tops.unsqueeze(1), fold(counted.counts, bins_per_octave)]
            rows = torch.cat([block.to(rows.dtype) for block in blocks], dim=1)
        return columns, rows

    def measure_final(self) -> None:
        """Measure the optimizers' gradients; those known to be unchanged are not read again."""
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
        self._update = None  # the previous optimizer's step may have been skipped
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
            sizes = self._spread(torch.stack([pieces.with_dense(before).norms(), weights], dim=1), rows)
            # Another optimizer may have measured other rows before.
            self._sizes = sizes if self._sizes is None else torch.where(sizes.isnan(), self._sizes, sizes)
            self._update = None

    def table(self) -> tuple[TableKeys, Tensor]:
        """Return all measurements, and the meaning of their rows and columns.

        The column ``final_l2`` is missing if the optimizers got the gradients unchanged.
        """
        columns, blocks = self._columns, [self._measured]
        later = [] if self._is_unchanged else [(["final_l2"], self._final)]
        later += [(["update_l2", "weight_l2"], self._sizes)] if self._spec.update_ratio else []
        for names, block in later:
            if block is None:  # no optimizer has stepped
                block = self._measured.new_full((len(self.params), len(names)), math.nan)
            columns, blocks = [*names, *columns], [block, *blocks]
        table = torch.cat(blocks, dim=1) if later else self._measured
        return TableKeys(tuple(self.params), tuple(self._present), tuple(columns)), table

    def _gradients(self) -> tuple[list[int], list[Tensor]]:
        """Return the rows that have a gradient, and these gradients."""
        grads = {row: param.grad for row, param in enumerate(self.params.values()) if param.grad is not None}
        return list(grads), list(grads.values())

    def _spread(self, values: Tensor, rows: list[int], missing: float = math.nan) -> Tensor:
        """Put the values of given parameters into a table with a row for each parameter."""
        if len(rows) == len(self.params):
            return values
        table = values.new_full((len(self.params), values.shape[1]), missing)
        return table.index_copy_(0, upload(rows, torch.int64, values.device), values)
