"""The gradient monitor: what every layer's gradient is like, and where gradients vanish, explode or never arrive."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from operator import attrgetter, mul
from typing import Any, cast

import torch
from torch import Tensor

from hookline.activations.flow import COUNTED, GradientFlow, Limits, Verdict, judge_norms
from hookline.errors import ConfigError, NothingMatches, nearest
from hookline.events.policy import logger
from hookline.events.schedule import Quantity, Schedule
from hookline.gradients.chain import OVERFLOWED
from hookline.hooks.gradient_look import Look, Sent, Wanted, percentile_name
from hookline.hooks.parameters import number, switch
from hookline.registry.base import TrainingHook
from hookline.stats.flush import Arrival, Flush

HALVINGS = 16  # so many overflows in a row are a scaler on its way down from where it begins, 65536
PREFIX = "gradients"  # of what it logs
MOMENTS = ("mean", "std", "min", "max", "absmax", "zeros", "nans", "infs")
BEHIND_THE_LOOK = {"on_gradients_ready", "on_update", "on_gradient_clip", "on_before_optimizer_step"}
Columns = Mapping[str, Sequence[float]]
_REQUIRES_GRAD = attrgetter("requires_grad")


class GradientMonitor(TrainingHook):
    """Norms, statistics, percentiles and histograms of every layer's gradient, and a word when one is in trouble.

    Looks every `log_frequency` steps, when the gradients are complete, unscaled and not yet clipped, and once more
    before the optimizer steps if somebody changed them. All parameters are measured in one pass on their device; the
    values arrive later, under their true step, and nothing waits for them. Means, extremes and counts of zeros, NaN and
    infinities (`log_moments`) are by default there where they cost nothing: on a GPU, and beside histograms or
    percentiles. On the CPU they take three times as long to read as norms.

    Per layer, in the model's order, they go to layers.jsonl: the series ``gradients`` and ``gradient_histograms``. What
    is true of all layers goes to metrics.jsonl as ``gradients/…``. A layer whose gradients vanish, explode, are not
    finite or never arrive is named in events.jsonl, once when it begins and once when it ends. What a GradScaler leaves
    out while it looks for its scale is no trouble.
    """

    built_in = True
    name = "gradient_monitor"
    saves = ("troubled",)
    # Word of trouble shall not wait for the next look. Where there is no device, it is told at the end of the step.
    always_hears = ("on_step_end",) if torch.version.cuda or torch.version.hip else ()

    def __init__(
        self,
        log_frequency: int | str = 100,
        log_histogram: bool = False,
        log_norm: bool = True,
        param_filter: str | Sequence[str] | None = None,
        percentiles: Sequence[float] | None = (),
        bins_per_octave: int = 8,
        log_moments: bool | None = None,
        log_update_ratio: bool = False,
        vanishing: float = 1e-7,
        exploding: float = 1e3,
        median_ratio: float = 1e-4,
    ) -> None:
        self.log_frequency, self.log_norm = log_frequency, switch(log_norm, "log_norm")
        self.param_filter = _checked_filter(param_filter)
        self.schedule = Schedule.parse(every=_checked_frequency(log_frequency))
        resolution = _checked_resolution(bins_per_octave) if switch(log_histogram, "log_histogram") else 0
        points, ratios = _checked_points(percentiles), switch(log_update_ratio, "log_update_ratio")
        self.log_moments = None if log_moments is None else switch(log_moments, "log_moments")
        free = bool(resolution or points or not log_norm)
        self._wanted = Wanted(free if self.log_moments is None else self.log_moments, resolution, points, ratios)
        self._wanted_on_device = self._wanted._replace(moments=self.log_moments is not False)
        self._limits = _checked_limits(vanishing, exploding, median_ratio)
        self.troubled: dict[str, Verdict] = {}
        """The layers that were in trouble at the newest look that has arrived."""
        self._newest: tuple[Mapping[str, torch.nn.Parameter], Sent, Sequence[float]] | None = None
        self._told: set[tuple[str, Verdict]] = set()
        self._look: Look | None = None
        self._overflowed: set[int] = set()  # steps on their way here that a GradScaler left out
        self._overflows = 0  # of these, how many looks in a row
        self._flush = Flush()
        self._chosen: dict[tuple[str, ...], tuple[tuple[str, ...], Tensor]] = {}  # what is recorded of which table
        self._asked_of: tuple[Any, ...] | None = None  # the hooks among which was looked for the user's own
        self._versions_tell = False
        self._own_name, self._prefix = self.name, PREFIX
        if not log_update_ratio:
            self.on_after_optimizer_step = None  # type: ignore[assignment] # it need not hear it

    def setup(self, name: str) -> None:
        """Sign notes with the name it goes by, and what a second one logs: it would overwrite the first one's."""
        self._own_name, self._prefix = name, PREFIX if name == self.name else f"{PREFIX}/{name}"

    def close(self) -> None:
        """Let go of what is under way."""
        self._look, self._flush, self._overflowed, self._asked_of = None, Flush(), set(), None

    # ---- looking -------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any) -> None:
        """Refuse a filter that matches nothing before the first step."""
        self._watched(trainer)

    def on_gradients_ready(self, trainer: Any, step: int) -> None:
        """Measure the gradients as the backward passes left them."""
        params = self._watched(trainer)
        self._look = Look(step, params, self._wanted_of(params), self._do_versions_tell(trainer))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Measure what the chain made of them; for the update ratio, keep the parameters as they are."""
        if self._look is not None:
            self._look.see_final()
            if self._wanted.update_ratio:
                self._look.before_step(optimizer)

    def on_after_optimizer_step(self) -> None:
        """Measure how far the parameters have moved."""
        if self._look is not None:
            self._look.after_step()

    def on_step_skipped(self, reason: str) -> None:
        """Remember which steps a GradScaler left out: that is how it finds its scale."""
        if self._look is not None and reason == OVERFLOWED:
            self._overflowed.add(self._look.step)

    def on_step_end(self, trainer: Any) -> None:
        """Send off what was measured, and record what has arrived."""
        if self._look is not None:
            self._flush.send(self._look.step, *self._look.table())
            self._look = None
        if self._flush:
            self._record(self._flush.ready(), trainer)

    def on_epoch_end(self, trainer: Any) -> None:
        """Record everything under the epoch it belongs to; the loop waits for the device here anyway."""
        self._record(self._flush.drain(), trainer)

    def on_train_end(self, trainer: Any) -> None:
        """Record what is still on its way."""
        self._record(self._flush.drain(), trainer)

    def _watched(self, trainer: Any) -> Mapping[str, torch.nn.Parameter]:
        """The parameters that are trained and pass the filter, in the model's order."""
        params, parts = _parameters(trainer), self.param_filter
        if not parts:
            trained = list(map(_REQUIRES_GRAD, params.values()))
            return params if all(trained) else dict(compress(params.items(), trained))
        for part in parts:
            if not any(part in name for name in params):
                message = f"{part!r} is part of no parameter's name; {nearest(part, params, 8)}"
                raise NothingMatches("gradient_monitor.param_filter", message)
        return {
            name: param for name, param in params.items() if param.requires_grad and any(part in name for part in parts)
        }

    def _wanted_of(self, params: Mapping[str, torch.nn.Parameter]) -> Wanted:
        """What is measured of these: on a device, one launch gives all statistics."""
        first = next(iter(params.values()), None)
        return self._wanted if first is None or first.is_cpu else self._wanted_on_device

    def _do_versions_tell(self, trainer: Any) -> bool:
        """Whether nobody writes to gradients in ways that no version counts; asked again when the hooks are others."""
        hooks = getattr(getattr(trainer, "hooks", None), "hooks", None)  # a new tuple with every change
        if hooks is None or hooks is not self._asked_of:
            self._asked_of, self._versions_tell = hooks, not _has_own_writers(trainer)
        return self._versions_tell

    # ---- recording -----------------------------------------------------------------------------------------------

    def _record(self, arrivals: Iterable[Arrival], trainer: Any) -> None:
        for step, keys, table in arrivals:
            names, there, named = sent = cast("Sent", keys)
            self._log_layers(names, named, table, trainer, step)
            if self._wanted.bins_per_octave:
                self._log_bins(names, table[:, len(named) :], len(there) == len(names), trainer, step)
            columns = _columns(named, table, there)
            self._log_scalars(columns, trainer, step)
            if not self._is_scaling(step):
                self._newest = _parameters(trainer), sent, columns["l2"]
                self._judge(sent, columns["l2"], trainer, step)

    def _log_layers(self, names: Sequence[str], named: tuple[str, ...], table: Tensor, trainer: Any, step: int) -> None:
        if named not in self._chosen:
            self._chosen[named] = _chosen(self._recorded(named), named)
        columns, places = self._chosen[named]
        if columns:
            values = table.index_select(1, places)
            if self._wanted.update_ratio:
                values[:, columns.index("update_ratio")] /= table[:, named.index("weight_l2")]
            trainer.log_layers("gradients", names, columns, values, step)

    def _log_bins(self, names: Sequence[str], bins: Tensor, complete: bool, trainer: Any, step: int) -> None:
        """The histograms; where there was no gradient, nothing was counted."""
        counts = (bins if complete else bins.nan_to_num()).unsqueeze(1)
        trainer.log_layers("gradient_histograms", names, ("count",), counts, step)

    def _recorded(self, named: Sequence[str]) -> dict[str, str]:
        """What layers.jsonl gets, and the columns it comes from; the update ratio is yet to be divided."""
        wanted, final = self._wanted, "final_l2" if "final_l2" in named else "l2"
        recorded = {"norm": "l2", "final_norm": final} if self.log_norm else {}
        recorded |= {name: name for name in MOMENTS if name in named and self.log_moments is not False}
        recorded |= {"update_ratio": "update_l2"} if wanted.update_ratio else {}
        recorded |= {name: name for name in map(percentile_name, wanted.points)}
        return recorded | ({"top_octave": "top_octave"} if wanted.bins_per_octave else {})

    def _log_scalars(self, columns: Columns, trainer: Any, step: int) -> None:
        """What is true of all watched layers together."""
        norms = columns["l2"]
        scalars: dict[str, float] = {}
        if self.log_norm and norms:
            total = _total(norms)
            scalars |= {"norm": total, "final_norm": _total(columns.get("final_l2", norms))}
            largest, smallest = (math.nan, math.nan) if math.isnan(total) else (max(norms), min(norms))
            scalars |= {"largest_norm": largest, "smallest_norm": smallest}
        if "zeros" in columns and self.log_moments is not False:
            scalars |= {name: sum(columns[name]) for name in ("zeros", "nans", "infs")}
        if self._wanted.update_ratio:
            scalars["update_ratio"] = _update_ratio(columns)
        for name, value in scalars.items():
            trainer.log(f"{self._prefix}/{name}", value, step)

    # ---- judging -------------------------------------------------------------------------------------------------

    def _is_scaling(self, step: int) -> bool:
        """Whether a GradScaler left the step out while it may still be on its way to the right scale."""
        self._overflows = self._overflows + 1 if step in self._overflowed else 0
        self._overflowed.discard(step)
        return 0 < self._overflows <= HALVINGS

    @property
    def latest(self) -> GradientFlow | None:
        """The verdict on every layer at the newest look that has arrived; prints as a table in the model's order."""
        if self._newest is None:
            return None
        params, (names, there, _), norms = self._newest
        known = {name: params[name] for name in names if name in params}
        return judge_norms(known, dict(zip([names[place] for place in there], norms, strict=True)), self._limits)

    def _judge(self, sent: Sent, norms: Sequence[float], trainer: Any, step: int) -> None:
        """Log how many layers are in trouble, and tell which begin to be and which no longer are."""
        healthy = len(norms) == len(sent.names) and self._limits.allow(norms)
        flow = None if healthy and not self.troubled else self.latest  # a verdict on each costs more than the look
        for key, verdict in COUNTED.items():
            trainer.log(f"{self._prefix}/layers_{key}", float(len(flow.of(verdict))) if flow else 0.0, step)
        if flow is not None:
            self._compare(flow, trainer, step)

    def _compare(self, flow: GradientFlow, trainer: Any, step: int) -> None:
        begun = {name: verdict for name, verdict in flow.troubled.items() if self.troubled.get(name) != verdict}
        over = [name for name in self.troubled if name not in flow.troubled]
        self.troubled = flow.troubled
        if begun or over:
            self._tell(flow, begun, over, trainer, step)

    def _tell(self, flow: GradientFlow, begun: dict[str, Verdict], over: list[str], trainer: Any, step: int) -> None:
        """The record hears every change; the console only what it has not heard before."""
        if callable(note := getattr(trainer, "note", None)):
            who = {"by": self._own_name, "measured_at": step}
            note("gradient_flow", **who, verdict=flow.verdict, parameters=begun, over=over)
        if not self._told.issuperset(begun.items()):
            logger.warning("step %d: %s", step, flow.verdict)
        self._told.update(begun.items())


def _parameters(trainer: Any) -> Mapping[str, torch.nn.Parameter]:
    """Those that the run trains, by name; of a host that does not list them, the model's."""
    return getattr(trainer, "params", None) or dict(trainer.model.named_parameters())


def _has_own_writers(trainer: Any) -> bool:
    """Whether a hook of the user's has gradients in its hands: it may write in ways that no version counts."""
    entries = getattr(getattr(trainer, "hooks", None), "entries", None)
    own = [entry for entry in entries() if entry.enabled and not entry.built_in] if callable(entries) else []
    return any(not BEHIND_THE_LOOK.isdisjoint(entry.listeners) for entry in own)


def _chosen(recorded: Mapping[str, str], named: Sequence[str]) -> tuple[tuple[str, ...], Tensor]:
    """The names of what is recorded, and where in a table with these columns it stands."""
    return tuple(recorded), torch.tensor([named.index(column) for column in recorded.values()], dtype=torch.int64)


def _columns(named: Sequence[str], table: Tensor, there: Sequence[int]) -> Columns:
    """The columns by name, of the gradients that are there, and without the bins.

    As Python's own numbers: an operation on a tensor, just now and then, takes longer than all that is to be counted.
    """
    rows = (table if table.shape[1] == len(named) else table[:, : len(named)]).tolist()
    kept = rows if len(there) == len(rows) else [rows[place] for place in there]
    return dict(zip(named, zip(*kept, strict=True), strict=True)) if kept else dict.fromkeys(named, ())


def _total(norms: Sequence[float]) -> float:
    """The norm of all of them from the norm of each."""
    return math.sqrt(sum(map(mul, norms, norms)))


def _update_ratio(columns: Columns) -> float:
    """How far all parameters were moved in relation to their size; an optimizer may have left the step out."""
    moved = [place for place, update in enumerate(columns["update_l2"]) if not math.isnan(update)]
    updates, weights = (_total([columns[name][place] for place in moved]) for name in ("update_l2", "weight_l2"))
    return updates / weights if weights else math.inf if updates else math.nan


def _checked_frequency(log_frequency: int | str) -> Quantity:
    every = Quantity.parse(log_frequency, "log_frequency")
    if every.amount <= 0:
        raise ConfigError("log_frequency", f"{log_frequency!r} is never due; the smallest is 1")
    return every


def _checked_resolution(bins_per_octave: int) -> int:
    if bins_per_octave not in (1, 2, 4, 8):
        raise ConfigError("bins_per_octave", f"expected 1, 2, 4 or 8, got {bins_per_octave!r}")
    return bins_per_octave


def _checked_points(percentiles: Sequence[float] | None) -> tuple[float, ...]:
    if percentiles is None:
        return ()
    listed = isinstance(percentiles, Sequence) and not isinstance(percentiles, str)
    wrong = [point for point in percentiles if not _is_percentage(point)] if listed else [percentiles]
    if wrong:
        raise ConfigError("percentiles", f"expected numbers from 0 to 100, such as [10, 50, 90]; got {wrong[0]!r}")
    return tuple(percentiles)


def _is_percentage(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 100


def _checked_filter(parts: str | Sequence[str] | None) -> Sequence[str] | None:
    given = [parts] if isinstance(parts, str) else parts
    if given is not None and not (isinstance(given, (list, tuple)) and all(isinstance(part, str) for part in given)):
        raise ConfigError("param_filter", f"expected a part of parameters' names, or a list of such; got {parts!r}")
    return given


def _checked_limits(vanishing: float, exploding: float, median_ratio: float) -> Limits:
    if not 0 < number(median_ratio, "median_ratio") < 1:
        raise ConfigError("median_ratio", f"expected a number between 0 and 1; got {median_ratio!r}")
    return Limits(number(vanishing, "vanishing"), number(exploding, "exploding"), median_ratio)
