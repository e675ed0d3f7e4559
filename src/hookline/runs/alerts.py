"""Find what deserves attention in the summary of a run: what its events say, and what its numbers show."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from warnings import catch_warnings

import numpy as np

from hookline._text import duration_text, first_of
from hookline.errors import RecordError
from hookline.record.events import EVENTS, Severity, describe_event, hook_of
from hookline.record.json_lines import as_mapping, as_number
from hookline.record.strict_json import field_values
from hookline.runs.config import is_whole
from hookline.runs.find import KILLED, RUNNING, RunFiles
from hookline.runs.learning import find_learning_alerts
from hookline.runs.stories import tell_stories
from hookline.runs.summary import NO_GOOD_CHECKPOINT, LayerTable, RunSummary
from hookline.runs.verdict import Alert, badness, judge

_NAMES_SHOWN = 3
_MAX_PER_KIND = 5  # alerts; the last one says how many more there are
_SPIKE_SPREADS = 8.0  # a range of steps whose highest value is this many spreads above those before it has a spike
_SPIKE_OF_LEARNED = 0.05  # Near 0, where spreads are tiny, a spike also exceeds this share of what was learned so far.
_BEFORE = 20  # ranges
_DEAD_SHARE, _WAIT_SHARE = 0.5, 0.3
_QUIET_SECONDS, _QUIET_TIMES = 300.0, 10  # without numbers, and times the longest pause so far

# How bad events are, by kind. Those about gradients and stalls are summed up over the run.
_SUMMED_UP = ("gradient_flow", "stall")
_TROUBLE = {
    name: kind.severity for name, kind in EVENTS.items() if kind.severity is not None and name not in _SUMMED_UP
}

_VERDICTS = {  # Verdicts of gradient_flow events, and whether the smallest (1) or largest norm is the worst.
    "vanishing": ("vanish in", 1),
    "exploding": ("explode in", -1),
    "non-finite": ("are not finite in", 0),
    "never arrived": ("never arrive at", 0),
}


def find_alerts(summary: RunSummary) -> list[Alert]:
    """Return what deserves attention, the worst first and then in the order of steps.

    Alerts with one cause are one, a story, whose parts they are.
    """
    layers = summary.layers
    flow = _from_gradient_flow(summary, layers.get("gradients"))
    alerts = [*_from_layers(summary, layers), *_from_events(summary, layers), *_from_stalls(summary), *flow]
    with np.errstate(over="ignore", invalid="ignore"):  # values near the largest float
        alerts += [*_from_curves(summary), *find_learning_alerts(summary), *_from_outcome(summary)]
    alerts = tell_stories(alerts)
    return sorted(alerts, key=badness)


def verdict_on(files: RunFiles) -> dict[str, Any] | None:
    """Return the verdict that a run ended with, or that on a killed run, which could write none; None without one.

    Of a killed run that has recorded much there is none: a list of runs has to stay quick.
    """
    recorded: dict[str, Any] | None = files.run.get("verdict")
    if recorded is not None or files.outcome != KILLED or not files.is_short:
        return recorded
    with suppress(RecordError), catch_warnings(action="ignore"):  # `show` tells which file cannot be read
        return field_values(judge(find_alerts(RunSummary.read(files))))
    return None


def _from_outcome(summary: RunSummary) -> Iterator[Alert]:
    run, files = summary.run, summary.files
    outcome, reason = run.get("outcome"), run.get("reason") or ""
    if outcome == "non_finite" and not _is_explained(reason, summary.events):
        yield Alert("non_finite", "error", None, f"the run ended with non-finite numbers: {reason}")
    elif outcome == "failed":
        yield Alert("failed", "error", files.step, f"the run failed: {reason}{_remedy(summary)}")
    elif outcome == "interrupted":
        text = f"the run was interrupted{f' ({reason})' if reason else ''}{_remedy(summary)}"
        yield Alert("interrupted", "info", files.step, text)
    elif "run_id" in run and files.outcome == KILLED:
        yield Alert("killed", "warning", files.step, f"the run was killed{_remedy(summary)}")
    elif files.outcome == RUNNING:
        yield from _is_quiet(summary)
    if run.get("lost"):
        yield Alert("lost", "error", None, f"{run['lost']:,} lines or values of the record could not be written")
    for file, damage in files.damage.items():
        severity: Severity = "info" if damage.is_torn else "error"
        yield Alert("incomplete" if damage.is_torn else "damaged", severity, None, f"{file}: {damage}")


def _is_quiet(summary: RunSummary) -> Iterator[Alert]:
    """Yield an alert if a run whose process is alive has written no numbers for far longer than ever before."""
    written = summary.times.mean
    if written.size < 2:
        return
    quiet, longest = time.time() - written[-1], float(np.diff(written).max())
    if quiet > max(_QUIET_SECONDS, _QUIET_TIMES * longest):
        pauses = f"no numbers for {duration_text(quiet)}; the longest earlier pause was {duration_text(longest)}"
        yield Alert(
            "quiet",
            "warning",
            summary.files.step,
            f"{pauses}: the run may be hanging; the hook `stall_watchdog` shows where",
        )


def _remedy(summary: RunSummary) -> str:
    """Return how to continue a run that did not finish."""
    if summary.resumable is None:
        why = NO_GOOD_CHECKPOINT if summary.checkpoints("checkpoint_saved") else "it has no checkpoint"
        return f"; {why}, so start it again"
    step, source = summary.resumable
    try:
        config = summary.files.config
    except RecordError:
        config = None
    name = summary.files.run_id + ("" if source == summary.files.path else f"/{source.name}")
    command, call = f": `hookline resume {name}`", ", in your code: `fit(resume=…)`, or `hl.load(…)`"
    return f"; resume it from its checkpoint of step {step:,}{command if is_whole(config) else call}"


# ---- events ----------------------------------------------------------------------------------------------------------


def _from_events(summary: RunSummary, layers: Mapping[str, LayerTable]) -> Iterator[Alert]:
    """Yield alerts for the events that mean trouble: one for all that say the same, and the first of many others."""
    alike: dict[tuple[str, str], list[dict[str, Any]]] = {}  # by kind and text
    for event in summary.events:
        if event["kind"] in _TROUBLE and not _is_how_it_ended(event, summary.run):
            alike.setdefault((event["kind"], describe_event(event)), []).append(event)
    listed: Counter[tuple[str, str]] = Counter()
    more: dict[str, list[dict[str, Any]]] = {}
    for (kind, text), (event, *others) in alike.items():
        place = _place(event, layers)
        listed[kind, str(place)] += 1
        if listed[kind, str(place)] > _MAX_PER_KIND:
            more.setdefault(kind, []).extend((event, *others))
        else:
            times = f" ({1 + len(others):,} times)" if others else ""
            yield Alert(kind, _severity(kind, summary.run), event.get("step"), f"{text}{times}", place)
    for kind, events in more.items():
        text = f"{len(events):,} more {kind.replace('_', ' ')} events"
        yield Alert(kind, _severity(kind, summary.run), events[0].get("step"), text, _place(events[0], layers))


def _severity(kind: str, run: Mapping[str, Any]) -> Severity:
    """Return how bad an event is for the whole run; for two kinds, the outcome and the curves say more.

    An exception before a resume is history, and so is a spike after which the run continued.
    """
    is_history = kind == "exception" or (kind == "loss_spike" and run.get("outcome") == "completed")
    return "info" if is_history else _TROUBLE[kind]


def _is_explained(reason: str, events: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether events say why a run is non-finite: an event of the hook that stopped it, or about weights."""
    kinds = ("crash", "non_finite") if reason.startswith("stopped by") else ("non_finite_weights",)
    return any(event["kind"] in kinds for event in events)


def _is_how_it_ended(event: Mapping[str, Any], run: Mapping[str, Any]) -> bool:
    """Return whether the run's outcome says what an event says."""
    return event["kind"] == "exception" and event.get("error") == run.get("reason")


def _from_stalls(summary: RunSummary) -> Iterator[Alert]:
    """For each hook and rank, yield one alert for the stalls that ended, and one for a stall that has not ended."""
    stalls: dict[tuple[str | None, str], list[Mapping[str, Any]]] = {}
    open_ones: dict[tuple[str | None, str], Mapping[str, Any]] = {}
    for event in summary.events:
        source = hook_of(event), str(event.get("rank"))
        if event["kind"] == "stall":
            stalls.setdefault(source, []).append(event)
            open_ones[source] = event
        elif event["kind"] == "stall_over":
            open_ones.pop(source, None)
    for source, events in stalls.items():
        current = open_ones.get(source)
        if current is not None and (summary.files.step or 0) <= (current.get("step") or 0):
            text = f"{describe_event(current)} at step {current.get('step')}, and the stall is not over"
            yield Alert("stall", "error", current.get("step"), text, _place(current, {}))
            events = events[:-1]
        if events:
            longest = max(events, key=lambda event: as_number(event.get("seconds")) or 0.0)
            times = f"; the longest of {len(events):,} stalls" if len(events) > 1 else ""
            text = f"{describe_event(longest)}{times}"
            yield Alert("stall", "warning", longest.get("step"), text, _place(longest, {}))


@dataclass
class GradientTrouble:
    """A hook's findings over a run about layers with one verdict, such as vanishing gradients."""

    first: int | None
    """The step of the first event."""
    last: int | None = None
    """The step of the last event, at which it may have been over."""
    is_over: bool = False
    times: int = 0
    least: int = 0
    """The fewest layers at a time, and the most."""
    most: int = 0
    names: dict[str, None] = field(default_factory=dict)
    """The layers in the order in which they came."""


def _gradient_troubles(events: Iterable[Mapping[str, Any]]) -> dict[tuple[str | None, str], GradientTrouble]:
    """Follow `gradient_flow` events, which have the changes since the last one of their hook; by hook and verdict."""
    troubles: dict[tuple[str | None, str], GradientTrouble] = {}
    verdicts: dict[str | None, dict[str, str]] = {}  # by hook: the current verdicts on layers
    for event in events:
        if event["kind"] != "gradient_flow":
            continue
        hook, step, over = hook_of(event), event.get("step"), event.get("over")
        # With a list of layers for which it is over, the event has what changed, otherwise everything.
        before = verdicts.get(hook, {}) if isinstance(over, list) else {}
        now = verdicts[hook] = {name: verdict for name, verdict in before.items() if name not in (over or ())}
        now |= {name: str(verdict) for name, verdict in as_mapping(event.get("parameters")).items()}
        for verdict in dict.fromkeys([*now.values(), *(known for of_hook, known in troubles if of_hook == hook)]):
            layers = [name for name in now if now[name] == verdict]
            trouble = troubles.setdefault((hook, verdict), GradientTrouble(step, least=len(layers)))
            if not layers and trouble.is_over:
                continue
            trouble.last, trouble.is_over = step, not layers
            if layers:
                trouble.times += 1
                trouble.least, trouble.most = min(trouble.least, len(layers)), max(trouble.most, len(layers))
                trouble.names |= dict.fromkeys(layers)
    return troubles


def _from_gradient_flow(summary: RunSummary, norms: LayerTable | None) -> Iterator[Alert]:
    """Yield one alert for each hook and verdict: the layers in trouble change at nearly every measurement."""
    for (hook, verdict), trouble in _gradient_troubles(summary.events).items():
        phrase, sign = _VERDICTS.get(verdict, (f"are {verdict} in", 0))
        worst, norm = _worst_norm(trouble.names, sign, norms)
        least, most = trouble.least, trouble.most
        layers = f"{least:,} to {most:,} layers" if least < most else f"{most:,} layers"
        text = f"gradients {phrase} {worst if len(trouble.names) == 1 else layers}"
        if trouble.first is not None and trouble.last is not None:
            steps = f"in steps {trouble.first:,} to {trouble.last:,}"
            text += f" {steps if trouble.is_over else f'from step {trouble.first:,} on'}"
        if norm is not None:
            text += f", norm {norm:.2g}" if len(trouble.names) == 1 else f", the worst {worst} at {norm:.2g}"
        elif len(trouble.names) > 1:
            text += f": {first_of([*trouble.names], _NAMES_SHOWN)}"
        text += f" ({trouble.times:,} times)" if trouble.times > 1 else ""
        place = {"series": "gradients", "name": worst, "column": "norm"}
        # Some layers get no gradient in the first step, such as LoRA's first matrix, because the second begins at zero.
        is_passing = trouble.is_over and trouble.times == 1
        severity: Severity = "info" if is_passing or _is_of_loss(verdict, trouble, norms) else "warning"
        yield Alert("gradient_flow", severity, trouble.first, f"{hook}: {text}" if hook else text, place)


def _is_of_loss(verdict: str, trouble: GradientTrouble, norms: LayerTable | None) -> bool:
    """Return whether the gradients of all layers vanish, and did not at first: the cause is the loss, not the layers.

    This happens when a model fits perfectly, when a margin is met, and when all rewards are equal.
    """
    if verdict != "vanishing" or trouble.first is None or norms is None or "norm" not in norms.columns:
        return False
    values = norms.values[:, :, norms.columns.index("norm")]
    layers = int(np.isfinite(values).any(axis=0).sum())
    return trouble.least == layers and trouble.first > norms.steps[0]


def _worst_norm(names: Mapping[str, None], sign: int, norms: LayerTable | None) -> tuple[str, float | None]:
    """Return the layer with the smallest norm (1) or the largest one (-1), and the norm; None if it is not known."""
    if norms is not None and sign and "norm" in norms.columns:
        rows = [row for row, name in enumerate(norms.names) if name in names]
        values = norms.values[:, rows, norms.columns.index("norm")]
        if np.isfinite(values).any():
            ranked = np.where(np.isfinite(values), sign * values, np.inf)
            step, place = np.unravel_index(ranked.argmin(), ranked.shape)
            return norms.names[rows[place]], float(values[step, place])
    return next(iter(names)), None


def _place(event: Mapping[str, Any], layers: Mapping[str, LayerTable]) -> dict[str, str]:
    """Return where an event leads: to the layer that it names, to its curve, or to its hook."""
    for series, table in layers.items():
        if event.get("module") in table.names:
            column = "nans" if "nans" in table.columns else table.columns[0]
            return {"series": series, "name": event["module"], "column": column}
    curve, hook = EVENTS[event["kind"]].curve or event.get("monitor"), hook_of(event)
    if isinstance(curve, str):
        return {"curve": curve}
    return {"hook": hook} if hook else {}


# ---- curves ----------------------------------------------------------------------------------------------------------


def _from_curves(summary: RunSummary) -> Iterator[Alert]:
    kinds = {event["kind"] for event in summary.events}
    for name, curve in summary.curves.items():
        if curve.non_finite is not None and not (name == "train/loss" and "non_finite_loss" in kinds):
            step, count = curve.non_finite
            values = "value is" if count == 1 else "values are"
            # A batch without counted targets has no accuracy; if training diverges, its loss says so, too.
            may_be_missing = name.startswith("train/") and not name.endswith("loss") and curve.finite
            is_over = not name.endswith("loss") and curve.last is not None and np.isfinite(curve.last.value)
            severity: Severity = "info" if may_be_missing else "warning" if is_over else "error"
            yield Alert("non_finite", severity, step, f"{name}: {count:,} {values} not finite", {"curve": name})
    # A hook that looked for spikes has already reported all of them.
    looked = any(hook["name"] == "loss_spike" and hook.get("enabled") is not False for hook in summary.hooks)
    if not looked and "loss_spike" not in kinds:
        yield from _spikes(summary, "train/loss")
    wait = summary.curves.get("throughput/data_wait_share")
    if wait is not None and wait.points:
        share = float(np.nanmean(wait.mean)) if np.isfinite(wait.mean).any() else 0.0
        if share > _WAIT_SHARE:
            text = f"input-bound: {share:.0%} of a step's time is spent waiting for data"
            # It is slow, which says nothing against its numbers.
            yield Alert("input_bound", "info", None, text, {"curve": "throughput/data_wait_share"})


def _spikes(summary: RunSummary, name: str) -> Iterator[Alert]:
    """Yield the ranges of steps whose highest value is far above the values before them, the worst first."""
    curve = summary.curves.get(name)
    if curve is None:
        return
    finite = np.isfinite(curve.mean)
    arrays = (curve.highest_at, curve.lowest, curve.highest, curve.mean)
    steps, lowest, highest, mean = (array[finite] for array in arrays)
    if len(steps) <= _BEFORE:
        return
    before, ranges, highs = (
        np.lib.stride_tricks.sliding_window_view(values, _BEFORE)[:-1] for values in (mean, highest - lowest, highest)
    )
    begin, middles = float(np.median(mean[:_BEFORE])), np.median(before, axis=1)
    # The extremes of a wide range of steps are farther from its mean than those of a narrow one.
    scatter, typical = np.median(np.abs(before - middles[:, None]), axis=1), np.median(ranges, axis=1)
    spreads = np.maximum.reduce([1.4826 * scatter, typical, 1e-3 * np.abs(middles)])
    rises = highest[_BEFORE:] - middles
    heights = np.divide(rises, spreads, out=np.zeros_like(rises), where=spreads != 0)
    # The first of several neighboring spikes counts, and losses with heavy tails have high values all the time.
    known = 2 * (highs.max(axis=1) - middles)
    is_spike = (heights > _SPIKE_SPREADS) & (rises > np.maximum(_SPIKE_OF_LEARNED * (begin - middles), known))
    columns = (heights, steps[_BEFORE:], highest[_BEFORE:], middles)
    spikes = zip(*(column[is_spike].tolist() for column in columns), strict=True)
    for above, step, value, middle in sorted(spikes, reverse=True)[:_MAX_PER_KIND]:
        text = f"{name} rose to {value:.4g}, {above:.3g} spreads above the median {middle:.4g} before it"
        yield Alert("spike", "info", int(step), text, {"curve": name})


# ---- layers ----------------------------------------------------------------------------------------------------------


def _from_layers(summary: RunSummary, layers: Mapping[str, LayerTable]) -> Iterator[Alert]:
    """Yield an alert for each series and kind of values that are not finite, and for dead units."""
    for (series, column), first_steps in summary.first_non_finite.items():
        step = min(first_steps.values())
        # The layer where it began, in the model's order, says more than the first one of all.
        origin = next(name for name in (*layers[series].names, *first_steps) if first_steps.get(name) == step)
        what = "NaN" if column == "nans" else "infinite values"
        more = f" and later in {len(first_steps) - 1} more" if len(first_steps) > 1 else ""
        text = f"{series}: {what} in {_layer(series, origin)}{more}"
        yield Alert("non_finite", "error", step, text, {"series": series, "name": origin, "column": column})
    yield from _ruined_layers(summary, layers)
    for series, table in layers.items():
        if {"dead_units", "units"} <= set(table.columns):
            yield from _dead_layers(series, table)


def _ruined_layers(summary: RunSummary, layers: Mapping[str, LayerTable]) -> Iterator[Alert]:
    """For each series that does not count NaN, yield an alert for the layers in which the loss's NaN may have begun.

    Those of later steps, at which the weights are not finite either, prove nothing.
    """
    loss = summary.curves.get("train/loss")
    if loss is None or loss.non_finite is None:
        return
    for series, since in summary.ruined_since.items():
        names = [name for name in layers[series].names if since.get(name, loss.non_finite[0] + 1) <= loss.non_finite[0]]
        if names:
            origin = min(names, key=since.__getitem__)
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            place = {"series": series, "name": origin, "column": layers[series].columns[0]}
            text = f"{series}: not finite in {_layer(series, origin)}{more}"
            yield Alert("non_finite", "error", since[origin], text, place)


def _layer(series: str, name: str) -> str:
    """Return how alerts name a layer; the name of a module may look like a count, such as 3."""
    return f"module {name!r}" if series == "activations" else repr(name)


def _dead_layers(series: str, table: LayerTable) -> Iterator[Alert]:
    """Yield one alert for the layers most of whose units were dead when they were last counted."""
    dead, units = (table.values[:, :, table.columns.index(column)] for column in ("dead_units", "units"))
    layers = []
    for index, name in enumerate(table.names):
        counted = np.flatnonzero(np.isfinite(dead[:, index]) & (np.nan_to_num(units[:, index]) > 0))
        if counted.size and (share := dead[counted[-1], index] / units[counted[-1], index]) >= _DEAD_SHARE:
            layers.append((float(share), name, int(table.steps[counted[-1]])))
    if layers:
        layers.sort(key=lambda layer: -layer[0])
        names = [f"{_layer(series, name)} ({share:.0%})" for share, name, _ in layers]
        text = f"{series}: most units are dead in {first_of(names, _NAMES_SHOWN)}"
        place = {"series": series, "name": layers[0][1], "column": "dead_units"}
        # The record does not say whether a ReLU follows: logits may be below 0 all the time.
        yield Alert("dead_units", "info", layers[0][2], text, place)
