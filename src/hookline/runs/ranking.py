"""Decide which of several runs is better, by one metric and by all others; the seeds of one config form a group."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hookline._text import counted, short_number
from hookline.runs.compare import Divergence, group_runs
from hookline.runs.curves import Curve, Point
from hookline.runs.direction import Direction, better, monitored_metric
from hookline.runs.find import RUNNING
from hookline.runs.summary import RunSummary

LOSSES = ("train/loss", "val/loss")  # what is drawn and judged unless other metrics are requested
_FIRST_METRICS = ("val/", "train/", "lr", "throughput/samples", "throughput/tokens", "throughput/steps", "throughput/")
_LATE = 0.1  # the share of a run at its end whose mean stands for a loss of single batches
_MINUS = "\N{MINUS SIGN}"
_MAX_FOLLOWING = 3  # runs in a headline after the best one

_SEED_IN_NAME = re.compile(r"([ _./=(-]+(seed|s)?)*\d*$", re.IGNORECASE)  # what comes before the seed in names of runs

Kind = Literal["last", "best", "late"]
_KINDS = {
    "last": "the last value of each run",
    "best": "the best value of each run, because a hook monitors it",
    "late": f"the mean over the last {_LATE:.0%} of each run, because the losses of single batches vary",
}


@dataclass(frozen=True)
class Group:
    """Runs that are compared as one: a run, or several whose configs are the same but for the seed."""

    name: str
    runs: tuple[int, ...]
    """Their places among all runs."""


@dataclass(frozen=True)
class Value:
    """A metric of a group: the mean over its runs, and the range between them."""

    mean: float
    least: float
    greatest: float
    runs: int
    """How many runs of the group have the metric."""
    step: int | None
    """Where a single run has its value."""


@dataclass(frozen=True)
class Row:
    """A metric of all groups."""

    metric: str
    kind: Kind
    """``last``, ``best``, or ``late``: the mean over the last tenth of the steps."""
    direction: Direction | None
    """The better direction of values, if it is known."""
    values: tuple[Value | None, ...]
    """By group; None for one without the metric."""
    changes: tuple[float | None, ...]
    """By group: the change against the first group as a share of its value, where there is one."""
    best: int | None
    """The best group; None if the direction is not known, or none is clearly better than the others."""

    @property
    def is_same(self) -> bool:
        """Whether all groups have equal values."""
        return all(value is not None and _range(value) == _range(self.values[0]) for value in self.values)


@dataclass(frozen=True)
class Ranking:
    """A comparison of several runs: the better one, and by how much."""

    headline: str
    """A sentence without its full stop."""
    notes: tuple[str, ...]
    """Sentences that say what the headline rests on, and what speaks against it."""
    groups: tuple[Group, ...]
    """The columns of `rows`: groups of seeds, or the runs themselves if all are seeds of one config."""
    judged: Row | None
    """The row of the headline; None if the runs have no metric in common."""
    rows: tuple[Row, ...]
    """The last value of every metric, the most important first; for those with a direction also the best one."""


def metric_order(name: str) -> tuple[int, str]:
    """Return the sort key of metrics: the losses, those of validation, those of training, then the others."""
    ranks = [index for index, prefix in enumerate(_FIRST_METRICS) if name.startswith(prefix)]
    place = LOSSES.index(name) if name in LOSSES else len(LOSSES) + min(ranks, default=len(_FIRST_METRICS))
    return place, name


def rank_runs(runs: Sequence[RunSummary], names: Sequence[str], divergences: Sequence[Divergence | None]) -> Ranking:
    """Compare runs by the metric that most of them monitor, otherwise by val/loss, or by train/loss if there is none.

    Args:
        runs: The runs, read with their numbers.
        names: A different name for each.
        divergences: Where each run after the first one diverges from it.
    """
    of_seeds = group_runs(runs)
    is_one_config = len(of_seeds) == 1 and len(runs) > 1
    members = [[place] for place in range(len(runs))] if is_one_config else of_seeds
    groups = tuple(
        Group(name, tuple(places)) for name, places in zip(_group_names(members, names), members, strict=True)
    )
    judged = _judged(runs, groups)
    metrics = sorted({name for run in runs for name in run.curves}, key=metric_order)
    if judged is not None:
        metrics = sorted(
            metrics, key=lambda name: name != judged.metric
        )  # it comes first, the order of the others stays
    rows = []
    for name in metrics:
        rows.append(_row(runs, groups, name, "last"))
        if rows[-1].direction is not None:
            rows.append(_row(runs, groups, name, "best"))
    notes: list[str] = []
    if all(map(_are_same, [runs[0]] * len(divergences), runs[1:], divergences)):
        steps = runs[0].numbers.steps.size
        headline = f"{_listed(names)} are the same, bit for bit, in all {counted(steps, 'step')}"
    elif judged is None:
        headline = f"{_listed(names)} have no metric in common that says which is better"
    else:
        headline, notes = _headline(judged, groups), _notes(judged, groups, runs, names, is_one_config)
    return Ranking(headline, tuple(notes), groups, judged, tuple(rows))


def _are_same(first: RunSummary, other: RunSummary, divergence: Divergence | None) -> bool:
    """Return whether two runs have equal numbers, and one does not merely have fewer of them."""
    if divergence is None or divergence.step is not None:
        return False
    ours, theirs = first.numbers.metrics, other.numbers.metrics
    return all(np.array_equal(ours[name][0], theirs[name][0]) for name in ours.keys() & theirs.keys())


def _group_names(members: Sequence[Sequence[int]], names: Sequence[str]) -> list[str]:
    """Return a name for each group: its run's name, or the prefix that only the names of its runs share."""
    labels = []
    for places in members:
        first, last = min(in_group := [names[place] for place in places]), max(in_group)
        same = sum(np.cumprod([a == b for a, b in zip(first, last, strict=False)]))
        prefix = _SEED_IN_NAME.sub("", first[: int(same)])
        others = [name for place, name in enumerate(names) if place not in places]
        if len(places) == 1:
            labels.append(in_group[0])
        elif prefix and not any(name.startswith(prefix) for name in others):
            labels.append(f"{prefix} ({len(places)} runs)")
        else:
            labels.append(f"{in_group[0]} and {len(places) - 1} more")
    return labels


# ---- the values of metrics -------------------------------------------------------------------------------------------


def _judged(runs: Sequence[RunSummary], groups: Sequence[Group]) -> Row | None:
    """Return the metric that decides: the first one that all runs have, or most of them."""
    monitored = Counter(name for run in runs for name in {monitored_metric(hook) for hook in run.hooks} if name)
    candidates = dict.fromkeys([*(name for name, _ in monitored.most_common()), "val/loss", "train/loss"])
    having = {name: sum(name in run.curves for run in runs) for name in candidates}
    name = max(having, key=having.__getitem__)  # the first one of equal counts
    if having[name] < 2:
        return None
    last = _row(runs, groups, name, "last")
    if name in monitored and last.direction is not None:
        return _row(runs, groups, name, "best")
    return _row(runs, groups, name, "late") if name.startswith("train/") else last


def _row(runs: Sequence[RunSummary], groups: Sequence[Group], name: str, kind: Kind) -> Row:
    direction = better(name, [hook for run in runs for hook in run.hooks])
    values = tuple(_value([runs[place].curves.get(name) for place in group.runs], kind, direction) for group in groups)
    changes = (None, *(_change(values[0], value) for value in values[1:]))
    order = _ranked(values, direction)
    best, *others = (value for place in order if (value := values[place]) is not None) if order else (None,)
    is_better = direction is not None and best is not None and others and _is_apart(best, others[0])
    return Row(name, kind, direction, values, changes, order[0] if is_better else None)


def _value(curves: Sequence[Curve | None], kind: Kind, direction: Direction | None) -> Value | None:
    points = [_point(curve, kind, direction) for curve in curves if curve is not None]
    known = [point for point in points if point is not None]
    if not known:
        return None
    values = [value for _, value in known]
    step = known[0][0] if len(known) == 1 else None
    mean = values[0] if len(set(values)) == 1 else sum(values) / len(values)
    return Value(mean, float(np.min(values)), float(np.max(values)), len(values), step)  # NaN if one is


def _point(curve: Curve, kind: Kind, direction: Direction | None) -> tuple[int | None, float] | None:
    point = best_point(curve, direction) if kind == "best" else curve.last
    if kind == "late" and point is not None and math.isfinite(point.value):
        late = curve.mean[curve.steps >= point.step - (point.step - curve.steps[0]) * _LATE]
        return None, float(np.nanmean(late))
    return None if point is None else (point.step, point.value)


def best_point(curve: Curve, direction: Direction | None) -> Point | None:
    """Return the best value of a curve and where it was first; None if the better direction is not known."""
    return None if direction is None else curve.least if direction == "low" else curve.greatest


def _change(first: Value | None, other: Value | None) -> float | None:
    """Return the change of the mean as a share of the first one; None where that says nothing."""
    if first is None or other is None or not math.isfinite(first.mean) or not math.isfinite(other.mean):
        return None
    if first.mean == other.mean:
        return 0.0
    change = (other.mean - first.mean) / abs(first.mean) if first.mean else math.inf
    return change if math.isfinite(change) else None


def _ranked(values: Sequence[Value | None], direction: Direction | None) -> list[int]:
    """Return the groups that have a value, the best first; those without a finite one come last."""
    sign = -1 if direction == "high" else 1
    known = {place: value.mean for place, value in enumerate(values) if value is not None}
    return sorted(known, key=lambda place: sign * known[place] if math.isfinite(known[place]) else math.inf)


def _range(value: Value | None) -> tuple[str, str]:
    """Return the ends of a value's range as strings, in which NaN equals itself."""
    return ("", "") if value is None else (repr(value.least), repr(value.greatest))


def _is_apart(first: Value, other: Value) -> bool:
    return not _is_equal(first.mean, other.mean) and not _overlap(first, other)


def _is_equal(first: float, other: float) -> bool:
    return first == other or not (math.isfinite(first) or math.isfinite(other))


# ---- sentences -------------------------------------------------------------------------------------------------------


def _headline(row: Row, groups: Sequence[Group]) -> str:
    """Say which group is better, or why none is."""
    order = _ranked(row.values, row.direction)
    known = [(groups[place].name, value) for place in order if (value := row.values[place]) is not None]
    if len(known) < 2:
        return f"only {known[0][0]} has {row.metric}" if known else f"no run has {row.metric}"
    (best, first), (second, other) = known[:2]
    texts = _distinct([value.mean for _, value in known])
    kind = "mean " if any(value.runs > 1 for _, value in known) else ""
    values = ", ".join(f"{name} {text}" for (name, _), text in zip(known, texts, strict=True))
    if row.direction is None:
        return f"it is not known whether a low or a high {row.metric} is better: {values}"
    if not math.isfinite(first.mean):
        return f"none is better: {row.metric} is not finite ({values})"
    tied = sum(_is_equal(first.mean, value.mean) for _, value in known)
    is_apart = tied > 1 or not _overlap(first, other)
    begin = tied if tied > 1 else 1 if is_apart and len(known) > 2 else 2
    following = [
        f"{name} {text}{_in_parentheses(_change(first, value))}"
        for (name, value), text in zip(known[begin : begin + _MAX_FOLLOWING], texts[begin:], strict=False)
    ]
    more = len(known) - begin - len(following)
    rest = f", then {', '.join(following)}{f' and {more} more' if more else ''}" if following else ""
    if tied > 1:
        return f"{_listed([name for name, _ in known[:tied]])} are equal: {kind}{row.metric} {texts[0]}{rest}"
    against = f"{kind}{row.metric} {texts[0]} against {texts[1]}{_in_parentheses(_change(other, first))}"
    if not is_apart:
        return f"{best} and {second} are not clearly different: {against}, and the ranges of their runs overlap{rest}"
    if len(known) == 2:
        return f"{best} is better: {against}"
    return f"{best} is the best of {len(known)}: {kind}{row.metric} {texts[0]}{rest}"


def _notes(
    row: Row, groups: Sequence[Group], runs: Sequence[RunSummary], names: Sequence[str], is_one_config: bool
) -> list[str]:
    """Say how a metric was taken, how far apart runs of one config are, and what else a reader should know."""
    notes = [f"{row.metric} is {_KINDS[row.kind]}."]
    pooled = Group("these", tuple(range(len(runs))))
    ranges = []
    for group in [pooled] if is_one_config else groups:
        value = _row(runs, [group], row.metric, row.kind).values[0]
        if value is not None and len(group.runs) > 1:
            span = f"{row.metric} is {_span(value)}"
            ranges.append(
                f"These {len(runs)} runs have the same config except for the seed: {span}. "
                "A difference inside that range says nothing about the config."
                if is_one_config
                else f"{group.name}, with the same config except for the seed: {span}."
            )
    notes += ranges
    lacking = [name for name, run in zip(names, runs, strict=True) if row.metric not in run.curves]
    if lacking:
        notes.append(f"{_listed(lacking)} {'has' if len(lacking) == 1 else 'have'} no {row.metric}.")
    ends = {
        name: point.step
        for name, run in zip(names, runs, strict=True)
        if row.metric in run.curves and (point := run.curves[row.metric].last) is not None
    }
    if len(set(ends.values())) > 1:
        listed = _listed([f"{name} at step {step:,}" for name, step in ends.items()])
        notes.append(f"Their last {row.metric} is at different steps: {listed}.")
    for name, run in zip(names, runs, strict=True):
        if run.files.outcome == RUNNING:
            notes.append(f"{name} is still running.")
    if row.kind == "best" and row.best is not None:
        last = _row(runs, groups, row.metric, "last")
        if last.best not in (None, row.best):
            notes.append(f"By the last value, {groups[last.best or 0].name} is better.")
    return notes


def _span(value: Value) -> str:
    least, mean, greatest = _distinct([value.least, value.mean, value.greatest])
    return f"{mean} on average, from {least} to {greatest} over {counted(value.runs, 'run')}"


def _overlap(first: Value, other: Value) -> bool:
    """Return whether the ranges of two groups overlap; two single runs have none."""
    has_range = first.runs > 1 or other.runs > 1
    return has_range and first.least <= other.greatest and other.least <= first.greatest


def _distinct(values: Sequence[float]) -> list[str]:
    """Return numbers of 4 digits; or of more if different ones would look the same."""
    digits = 4
    while digits < 17 and len({short_number(value, digits) for value in values}) < len(
        {repr(value) for value in values}
    ):
        digits += 1
    return [short_number(value, digits) for value in values]


def change_text(change: float) -> str:
    r"""Return a change as a percentage with its sign.

    >>> [change_text(change) for change in (-0.0191, 0.25, 12.5, 1e-6, 0.0)]
    ['\N{MINUS SIGN}1.9 %', '+25 %', '+1,250 %', '+<0.01 %', '=']
    """
    if not change:
        return "="
    percent = abs(change) * 100
    digits = 0 if percent >= 10 else 1 if percent >= 1 else 2
    size = "<0.01" if percent < 0.01 else f"{percent:,.{digits}f}"
    return f"{'+' if change > 0 else _MINUS}{size} %"


def _in_parentheses(change: float | None) -> str:
    return f" ({change_text(change)})" if change else ""


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def describe_ranking(ranking: Ranking, runs: Sequence[RunSummary]) -> Mapping[str, object]:
    """Return a ranking for programs and for the page, with the ids and seeds of the runs of each group."""
    return {
        "headline": ranking.headline,
        "notes": ranking.notes,
        "groups": [
            {
                "name": group.name,
                "runs": [runs[place].files.run_id for place in group.runs],
                "seeds": [runs[place].run.get("seed") for place in group.runs],
                "places": group.runs,
            }
            for group in ranking.groups
        ],
        "judged": ranking.judged,
        "rows": ranking.rows,
    }
