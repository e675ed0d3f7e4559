"""Write report.html from summaries of runs: their data as JSON, the page's own script and style, and uPlot.

Treat everything in the data as hostile: names, notes and logged text may contain markup. The data is JSON without a
single "<", the script only ever sets text, and the page's Content-Security-Policy allows the scripts and the style by
their hashes and nothing else.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookline._fs import refuse_link, write_atomic
from hookline.record import strict_json
from hookline.record.events import EVENTS, describe_event
from hookline.record.format import MediaRow, utc_now
from hookline.record.json_lines import writing
from hookline.runs.alerts import find_alerts
from hookline.runs.compare import Divergence, find_differences, find_divergence, likely_causes
from hookline.runs.curves import Curve
from hookline.runs.direction import better
from hookline.runs.find import run_labels
from hookline.runs.ranking import describe_ranking, rank_runs
from hookline.runs.summary import HistogramTable, LayerTable, RunSummary, merge_pairs
from hookline.runs.verdict import Alert, judge

Array = NDArray[Any]

STYLES = ("uPlot.min.css", "report.css")
SCRIPTS = ("format.js", "data.js", "plots.js", "layers.js", "compare.js", "page.js")  # in the order of their imports
LIBRARY = "uPlot.iife.min.js"

# A page of 3 MB has 2.1 MB of numbers, because base64 takes 4 characters for 3 bytes. Each further run of a comparison
# gets less: their curves are drawn over each other in the same plots.
BYTES_OF_NUMBERS, BYTES_OF_NUMBERS_PER_FURTHER_RUN = 2_050_000, 700_000
BYTES_OF_MEDIA = 400_000
_CURVE_FIELDS = 200  # approximate bytes: the name of a curve, its last and best values and where its arrays are
# The parts that people look at in a page. The record has the rest, and the page says how much that is.
MAX_TABLE_ROWS, MAX_TABLE_COLUMNS = 200, 50
MAX_DIFFERENCES, MAX_LEFT_OUT, MAX_EVENTS, MAX_PARTS = 1000, 50, 600, 100
MAX_COMPARED = 80  # rows of the comparison's table
MAX_NAME_LENGTH = 60  # characters of a run's name in a sentence
MAX_CONFIG_LENGTH, MAX_TEXT_LENGTH, MAX_CELL_LENGTH = 100_000, 2000, 1000  # characters

# Fields of run.json that the script reads, for a run that has not written them yet.
_EMPTY: dict[str, Any] = {"counters": {}, "environment": {}, "git": {}, "attempts": [], "hooks": [], "costs": []}

# The groups of marks in charts, in the order of their legend: their signs, and the names of their colors in report.css.
MARKS = {
    "failure": ("✖", "error"),
    "stop": ("■", "warning"),
    "restart": ("↻", "line-0"),
    "NaN or infinity": ("◆", "nan"),
    "loss spike": ("▲", "warning"),
    "checkpoint": ("|", "muted"),
    "hook failure": ("!", "error"),
}


def write_report(path: Path, summaries: Sequence[RunSummary]) -> None:
    """Make a report and replace the file atomically. Raises `RecordError` if it cannot be written."""
    data = make_report(summaries)
    with writing(path):
        refuse_link(path)
        # The report can be written again from the record, so nothing waits until the disk has it.
        write_atomic(path, data, durable=False)


def make_report(summaries: Sequence[RunSummary]) -> bytes:
    """Return report.html for one run, or for several that are compared."""
    count = len(summaries)
    numbers = [
        PageNumbers(
            {name: CurveArrays.of(curve) for name, curve in summary.curves.items()}, summary.layers, summary.histograms
        )
        for summary in summaries
    ]
    media = [_newest_media(summary.newest_media(), BYTES_OF_MEDIA // count) for summary in summaries]
    budget = BYTES_OF_NUMBERS + BYTES_OF_NUMBERS_PER_FURTHER_RUN * (count - 1)
    fit(numbers, budget - sum(_size_of_media(row) for rows in media for row in rows) * 3 // 4)
    runs, arrays = [], Arrays()
    names = run_labels([summary.files for summary in summaries])
    hooks = [hook for summary in summaries for hook in summary.hooks]
    for index, summary in enumerate(summaries):
        shown, events, alerts = numbers[index], _first_and_last(summary.events), find_alerts(summary)
        runs.append(
            {
                "run_id": summary.run.get("run_id"),
                "name": _cut(names[index]),
                "labels": summary.files.labels,
                "run": _cut({**summary.run, **{name: summary.run.get(name, empty) for name, empty in _EMPTY.items()}}),
                "epochs": _completed_epochs(summary),
                "seconds": summary.files.seconds,
                "step_seconds": summary.step_seconds,
                "attempt": _last_attempt(summary),
                "config": summary.config[:MAX_CONFIG_LENGTH],
                "curves": {
                    name: {**_curve(summary.curves[name], curve, arrays), "better": better(name, hooks)}
                    for name, curve in shown.curves.items()
                },
                "layers": {series: _layers(table, arrays) for series, table in shown.layers.items()},
                "histograms": {series: _histograms(table, arrays) for series, table in shown.histograms.items()},
                "events": _cut(events),
                "event_texts": [_cut(describe_event(event)) for event in events],
                "event_count": len(summary.events),
                "verdict": _cut(strict_json.field_values(judge(alerts))),
                "alerts": [_cut(_alert(alert)) for alert in alerts],
                "last_finite": _last_finite_step(summary),
                "clock": _clock(summary, arrays),
                "media": [_shown_media(row) for row in media[index]],
                "left_out": _left_out(shown, len(summary.media_lines) - len(media[index])),
            }
        )
    kinds = {kind: known.mark for kind, known in EVENTS.items() if known.mark is not None}
    page = {"version": 1, "written": utc_now(), "marks": {"kinds": kinds, "groups": MARKS}, "runs": runs}
    if count > 1:
        differences = map(strict_json.field_values, find_differences(summaries)[:MAX_DIFFERENCES])
        places = [find_divergence(summaries[0], other) for other in summaries[1:]]
        divergences = [
            _divergence(summaries[0], other, where) for other, where in zip(summaries[1:], places, strict=True)
        ]
        page |= {"differences": _cut([*differences]), "divergences": _cut(divergences)}
        ranking = rank_runs(summaries, [name[:MAX_NAME_LENGTH] for name in names], places)
        shown_rows = replace(ranking, rows=ranking.rows[:MAX_COMPARED])
        page["ranking"] = _cut(strict_json.simplify(describe_ranking(shown_rows, summaries)))
    data = strict_json.dumps(page)
    # Base64 needs no escaping, and converting megabytes of it like other strings would take most of the time.
    listed = '","'.join(arrays.encoded)
    return assemble(f'{data[:-1]},"arrays":["{listed}"]}}')


def assemble(data: str) -> bytes:
    """Put the page's data, as JSON, into the template, with the policy that lets only the page's own script run."""
    style, library, script, template = _parts()
    policy = (
        f"default-src 'none'; script-src {_source(library)} {_source(script)}; style-src {_source(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    # Escaped, no "</script>" or "<!--" can end or change the element, and a JSON parser reads the same text.
    escaped = data.replace("<", "\\u003c")
    filled = {"policy": policy, "style": style, "data": escaped, "library": library, "script": script}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: filled[match[1]], template).encode()


def _source(text: str) -> str:
    """Return how a policy names the text of an inline script or style."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


@cache
def _parts() -> tuple[str, str, str, str]:
    """Read the style, uPlot, the script and the template."""
    folder = files("hookline.report")

    def read(*names: str) -> str:
        return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)

    # One file on a disk cannot import others: the modules are joined in their order, in one scope.
    modules = re.sub(r"^import [^;]*;\n|^export ", "", read(*SCRIPTS), flags=re.MULTILINE)
    script = f'(() => {{\n"use strict";\n{modules}\n}})();\n'
    return read(*STYLES), read(LIBRARY), script, read("page.html")


# ---- numbers that fit ------------------------------------------------------------------------------------------------
#
# Neighboring ranges of steps are merged until all numbers fit, those of the longest tables first: a validation has few
# points, and loses none for the sake of the others. A spike survives: curves keep the lowest and the highest value of a
# range, layers the value farthest from 0.


@dataclass(frozen=True)
class CurveArrays:
    """The arrays of a curve, one entry per range of steps."""

    steps: Array
    mean: Array
    lowest: Array
    highest: Array

    @classmethod
    def of(cls, curve: Curve) -> CurveArrays:
        """Return the arrays of a curve in the precision of the page; a curve of single steps has one for all three."""
        with np.errstate(over="ignore"):  # values beyond float32 become infinite, and are drawn as gaps
            mean = curve.mean.astype(np.float32)
            extremes = (curve.lowest, curve.highest) if curve.width > 1 else (mean, mean)
            lowest, highest = (array.astype(np.float32, copy=False) for array in extremes)
        return cls(curve.steps, mean, lowest, highest)

    def halved(self) -> CurveArrays:
        """Return the arrays with neighboring ranges merged in pairs."""
        mean = merge_pairs(self.mean, lambda a, b: np.where(np.isnan(a), b, np.where(np.isnan(b), a, (a + b) / 2)))
        lowest, highest = merge_pairs(self.lowest, np.fmin), merge_pairs(self.highest, np.fmax)
        return CurveArrays(self.steps[::2], mean, lowest, highest)


@dataclass
class PageNumbers:
    """The numbers of a run."""

    curves: dict[str, CurveArrays]
    layers: dict[str, LayerTable]
    histograms: dict[str, HistogramTable]
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """By kind, the names for which there was no room."""


def fit(runs: Sequence[PageNumbers], budget: int) -> None:
    """Merge ranges until all numbers take at most this many bytes; always in the kind that takes the most.

    If one range for all steps takes too much, the last names of the largest kind are left out.
    """

    def tables(kind: str) -> list[CurveArrays | LayerTable | HistogramTable]:
        return [table for run in runs for table in getattr(run, kind).values()]

    sizes = {kind: sum(map(_size_in_page, tables(kind))) for kind in ("curves", "layers", "histograms")}
    while sum(sizes.values()) > budget:
        mergeable = [kind for kind in sizes if any(len(table.steps) > 1 for table in tables(kind))]
        kind = max(mergeable or sizes, key=sizes.__getitem__)
        longest = max((len(table.steps) for table in tables(kind)), default=0)
        for run in runs:
            by_name = getattr(run, kind)
            if mergeable:
                by_name.update(
                    {name: table.halved() for name, table in by_name.items() if 2 * len(table.steps) > longest}
                )
                continue
            for name in list(by_name)[len(by_name) // 2 :]:
                del by_name[name]
                run.left_out.setdefault(kind, []).append(name)
        sizes[kind] = sum(map(_size_in_page, tables(kind)))


def _size_in_page(table: CurveArrays | LayerTable | HistogramTable) -> int:
    """Return how many bytes the numbers and the names of a table take together."""
    if isinstance(table, CurveArrays):
        # Most curves share their steps, and those of single steps have one array for all three values.
        return table.mean.nbytes * (1 if table.lowest is table.mean else 3) + _CURVE_FIELDS
    # With quotes and a comma; numbers are written as base64, names are not.
    names = sum(len(name) + 3 for name in table.names) * 3 // 4
    if isinstance(table, LayerTable):
        return table.values.size * 4 + names
    return table.counts.size + table.tops.size * 2 + names  # a count takes a byte, the end of a window two


# ---- the parts of a run ----------------------------------------------------------------------------------------------


def _alert(alert: Alert) -> dict[str, Any]:
    """Return an alert with the alerts that it combines."""
    return {**strict_json.field_values(alert), "parts": [_alert(part) for part in alert.parts[:MAX_PARTS]]}


def _completed_epochs(summary: RunSummary) -> int | None:
    """Return how many epochs were completed: run.json has the number of the last one that began, from 0."""
    counters = summary.run.get("counters", {})
    epoch, losses = counters.get("epoch"), summary.curves.get("train/epoch_loss")
    if epoch is None:
        return None
    ended = losses is not None and losses.last is not None and losses.last.step == counters.get("step")
    return int(epoch + ended)


def _last_finite_step(summary: RunSummary) -> int | None:
    """Return the step before the first NaN or infinity of a layer or of the loss; None if there is none."""
    first = [step for steps in summary.first_non_finite.values() for step in steps.values()]
    loss = summary.curves.get("train/loss")
    if loss is not None and loss.non_finite is not None:
        first.append(loss.non_finite[0])
    return min(first) - 1 if first else None


def _clock(summary: RunSummary, arrays: Arrays) -> dict[str, Any]:
    """Return the seconds since the first row at each range of steps, and how many tokens a step had on average."""
    times, counters = summary.times, summary.run.get("counters", {})
    seconds = np.maximum.accumulate(times.mean - times.mean[0]) if times.points else times.mean
    tokens, steps = counters.get("tokens_seen"), counters.get("step")
    return {
        "steps": arrays.add(times.steps, "<f8"),
        "seconds": arrays.add(seconds, "<f8"),
        "tokens_per_step": tokens / steps if tokens and steps else None,
    }


def _last_attempt(summary: RunSummary) -> dict[str, Any]:
    """Return the duration and the steps of the last attempt, which the costs of hooks are about."""
    step = summary.run.get("counters", {}).get("step")
    begun = [event.get("step") for event in summary.events if event["kind"] in ("checkpoint_loaded", "begun_again")]
    resumed_at = begun[-1] if begun else 0
    return {"seconds": summary.files.last_attempt_seconds, "steps": None if step is None else step - (resumed_at or 0)}


def _left_out(numbers: PageNumbers, media: int) -> dict[str, Any]:
    """Return everything that the page has no room for: names by kind, and the number of tables and images."""
    names = {kind: [*map(_cut, kinds[:MAX_LEFT_OUT])] for kind, kinds in numbers.left_out.items()}
    return {"names": names, "counts": {kind: len(kinds) for kind, kinds in numbers.left_out.items()} | {"media": media}}


def _divergence(first: RunSummary, other: RunSummary, divergence: Divergence | None) -> dict[str, Any]:
    """Return where a run diverges from the first one, and the likely causes."""
    if divergence is None:
        return {"text": "have no step in common", "causes": []}
    causes = likely_causes(first, other, divergence, find_differences([first, other]))
    return {"text": str(divergence), "causes": causes}


class Arrays:
    """Arrays of numbers as base64, each different one once; other parts of the data refer to them by index."""

    def __init__(self) -> None:
        self.encoded: list[str] = []
        self._indices: dict[bytes, int] = {}

    def add(self, values: Array, dtype: str) -> int:
        """Return the index of an array, which is stored in little-endian order on every machine."""
        data = np.ascontiguousarray(values, dtype=dtype).tobytes()
        if data not in self._indices:
            self._indices[data] = len(self.encoded)
            self.encoded.append(b64encode(data).decode())
        return self._indices[data]


def _first_and_last(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events that the page has room for, in their order: for each kind, as many first as last ones.

    Frequent kinds have to make room first, so that they displace neither an exception nor a checkpoint.
    """
    totals, before = Counter(event["kind"] for event in events), Counter[str]()
    distances = []  # from the first or the last event of a kind
    for event in events:
        distances.append(min(before[event["kind"]], totals[event["kind"]] - 1 - before[event["kind"]]))
        before[event["kind"]] += 1
    places = sorted(range(len(events)), key=distances.__getitem__)[:MAX_EVENTS]
    return [events[place] for place in sorted(places)]


def _cut(value: Any, longest: int = MAX_TEXT_LENGTH) -> Any:
    """Return plain values with long strings cut, because nobody reads megabytes of text."""
    if isinstance(value, str):
        return value if len(value) <= longest else f"{value[:longest]} … ({len(value):,} characters)"
    if isinstance(value, Mapping):
        return {key: _cut(item) for key, item in value.items()}
    return [_cut(item) for item in value] if isinstance(value, (list, tuple)) else value


def _curve(curve: Curve, values: CurveArrays, arrays: Arrays) -> dict[str, Any]:
    return {
        "steps": arrays.add(values.steps, "<f8"),
        "mean": (mean := arrays.add(values.mean, "<f4")),
        "lowest": mean if values.lowest is values.mean else arrays.add(values.lowest, "<f4"),
        "highest": mean if values.lowest is values.mean else arrays.add(values.highest, "<f4"),
        **{
            name: None if point is None else [point.step, point.value]
            for name, point in (("last", curve.last), ("least", curve.least), ("greatest", curve.greatest))
        },
        "non_finite": curve.non_finite,
    }


def _layers(table: LayerTable, arrays: Arrays) -> dict[str, Any]:
    steps, values = arrays.add(table.steps, "<f8"), arrays.add(table.values, "<f4")
    return {"names": table.names, "columns": table.columns, "steps": steps, "values": values}


def _histograms(table: HistogramTable, arrays: Arrays) -> dict[str, Any]:
    """Scale each histogram to its fullest bin, because its shape is what matters."""
    fullest = table.counts.max(axis=-1, keepdims=True, initial=0)
    scaled = np.ceil(255 * table.counts / np.where(fullest > 0, fullest, 1))  # a bin with one value stays visible
    counts, tops = arrays.add(scaled, "u1"), arrays.add(table.tops, "<i2")
    return {"names": table.names, "steps": arrays.add(table.steps, "<f8"), "tops": tops, "counts": counts}


def _newest_media(newest_first: Iterable[MediaRow], budget: int) -> list[MediaRow]:
    """Return the newest tables and images that a report has room for, in the order in which they came."""
    chosen = []
    for row in newest_first:
        if (size := _size_of_media(row)) <= budget:
            budget -= size
            chosen.append(row)
    return chosen[::-1]


def _size_of_media(row: MediaRow) -> int:
    """Estimate how many characters a table or an image takes in the page."""
    if hasattr(row.content, "png"):
        return len(row.content.png) * 4 // 3
    return len(strict_json.dumps(_shown_media(row)))


def _shown_media(row: MediaRow) -> dict[str, Any]:
    content, shown = row.content, {"step": row.step, "name": row.name}
    if hasattr(content, "png"):
        return {**shown, "type": "image", "png": b64encode(content.png).decode()}
    rows, sums = content.rows[:MAX_TABLE_ROWS], None
    if content.kind == "confusion_matrix":  # the sum of each row, including columns that are cut
        sums = [sum(cell for cell in cells if isinstance(cell, (int, float))) for cells in rows]
    return {
        **shown,
        "type": "table",
        "kind": content.kind,
        "columns": content.columns[:MAX_TABLE_COLUMNS],
        "rows": [[_cut(cell, MAX_CELL_LENGTH) for cell in cells[:MAX_TABLE_COLUMNS]] for cells in rows],
        "sums": sums,
        "total_columns": len(content.columns),
        "total_rows": len(content.rows),
    }
