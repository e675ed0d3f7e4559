"""`hookline compare`: what differs between runs, their curves over each other, and the step at which they part."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.console import Console

from hookline.cli.charts import draw_chart
from hookline.cli.find_run import run_labels
from hookline.cli.formatting import cut, heading, labelled, open_console, paragraph, print_json, table
from hookline.errors import HooklineError
from hookline.record.comparison import MISSING, Difference, Parting, find_differences, find_partings, likely_causes
from hookline.record.curves import Curve, Point
from hookline.record.json_lines import NON_FINITE
from hookline.record.runs import RunFiles
from hookline.record.summary import RunSummary
from hookline.report.direction import Direction, better

_MOST_DIFFERENCES, _MOST_CAUSES, _MOST_METRICS = 40, 5, 12
_LONGEST_VALUE = 60
_NO_PARTING = dict.fromkeys(field.name for field in fields(Parting))  # of runs without a common step


def run(options: argparse.Namespace) -> int:
    """Print the comparison of two or more runs; the others are compared with the first."""
    files = list({path.resolve(): RunFiles.read(path) for path in map(Path, options.runs)}.values())
    if len(files) < 2:
        raise HooklineError("compare needs at least two runs; `hookline runs` lists them")
    summaries = [RunSummary.read(one.path) for one in files]
    differences = find_differences(summaries)
    partings = find_partings(summaries[0], summaries[1:])
    causes = [
        [] if parting is None else likely_causes(summaries[0], other, parting, find_differences([summaries[0], other]))
        for other, parting in zip(summaries[1:], partings, strict=True)
    ]
    names = [cut(label, _LONGEST_VALUE) for label in run_labels(files)]
    if options.json:
        print_json(describe(files, summaries, differences, partings, causes))
        return 0
    console = open_console()
    print_partings(console, names, partings, causes)
    print_differences(console, names, differences)
    print_curves(console, names, summaries)
    print_metrics(console, names, summaries)
    return 0


def describe(
    files: Sequence[RunFiles],
    summaries: Sequence[RunSummary],
    differences: Sequence[Difference],
    partings: Sequence[Parting | None],
    causes: Sequence[Sequence[str]],
) -> dict[str, Any]:
    """Return a comparison for programs."""
    return {
        "runs": [{"run_id": one.run_id, "name": one.labels.name, "path": str(one.path)} for one in files],
        "differences": [asdict(one) for one in differences],
        "partings": [
            {"run_id": one.run_id, **(_NO_PARTING if parting is None else asdict(parting)), "likely_causes": list(why)}
            for one, parting, why in zip(files[1:], partings, causes, strict=True)
        ],
        "metrics": {
            name: [
                None if curve is None else {"last": _fields(curve.last), "best": _fields(_best(curve, direction))}
                for curve in (summary.curves.get(name) for summary in summaries)
            ]
            for name, direction in _common_metrics(summaries).items()
        },
    }


def print_partings(
    console: Console, names: Sequence[str], partings: Sequence[Parting | None], causes: Sequence[Sequence[str]]
) -> None:
    """Print for each run where it parts from the first one, and why that may be."""
    for name, parting, why in zip(names[1:], partings, causes, strict=True):
        heading(console, f"{names[0]} and {name}")
        if parting is None:
            paragraph(console, "have no step in common")
            continue
        if parting.step is None:
            steps = f"{parting.before:,} step{'s' if parting.before != 1 else ''}"
            paragraph(console, f"are the same, bit for bit, in all {steps} that both have recorded")
            continue
        same = f"the {parting.before:,} steps before it are the same" if parting.before else "it is the first step"
        first, second = (_number(value) for value in parting.values)
        values = "" if first == second == "" else f": {first} and {second}"
        paragraph(console, f"part at step {parting.step:,}, where {cut(parting.name, 100)} differs{values}; {same}")
        for index, cause in enumerate(why[:_MOST_CAUSES]):
            labelled(console, "" if index else "likely", cut(cause), width=8)
        if len(why) > _MOST_CAUSES:
            labelled(console, "", f"and {len(why) - _MOST_CAUSES} more below", width=8)


def print_differences(console: Console, names: Sequence[str], differences: Sequence[Difference]) -> None:
    """Print what is not the same in all runs, by section."""
    console.print()
    heading(console, "differences", "" if differences else "none in config, hooks, environment and git")
    if not differences:
        return
    rows, section = [], ""
    for one in differences[:_MOST_DIFFERENCES]:
        rows.append(([one.section if one.section != section else "", cut(one.key, 100), *map(_shown, one.values)], ""))
        section = one.section
    table(console, {"": {"style": "dim"}, "key": {}, **{name: {} for name in names}}, rows, width=console.width)
    if len(differences) > _MOST_DIFFERENCES:
        paragraph(console, f"and {len(differences) - _MOST_DIFFERENCES} more; --json has all", indent=0)


def print_curves(console: Console, names: Sequence[str], summaries: Sequence[RunSummary]) -> None:
    """Draw the losses of all runs over each other."""
    for metric in ("train/loss", "val/loss"):
        curves = [run.curves.get(metric) for run in summaries]
        drawn = {
            name: None if curve is None or curve.points < 2 else (curve.steps, curve.lowest, curve.highest)
            for name, curve in zip(names, curves, strict=True)
        }
        if any(drawn.values()):
            console.print()
            draw_chart(console, drawn, title=metric)


def print_metrics(console: Console, names: Sequence[str], summaries: Sequence[RunSummary]) -> None:
    """Print the last value of each run side by side, and the best one if it is known which direction is better."""
    metrics = _common_metrics(summaries)
    if not metrics:
        return
    console.print()
    heading(console, "metrics", "last; best with its step, if lower or higher is better")
    rows = []
    for metric, direction in list(metrics.items())[:_MOST_METRICS]:
        cells = []
        for summary in summaries:
            curve = summary.curves.get(metric)
            last, best = (None, None) if curve is None else (curve.last, _best(curve, direction))
            shown = "" if best is None else f"; {best.value:.4g} at {best.step:,}"
            cells.append("-" if last is None else f"{last.value:.4g}{shown}")
        rows.append(([cut(metric, 100), *cells], ""))
    table(console, {"metric": {}, **{name: {} for name in names}}, rows, width=console.width)


def _common_metrics(summaries: Sequence[RunSummary]) -> dict[str, Direction | None]:
    """Return the metrics of training and validation that runs have, the losses first, and which direction is better."""
    found = {name for summary in summaries for name in summary.curves if name.startswith(("val/", "train/"))}
    hooks = [hook for summary in summaries for hook in summary.hooks]
    return {name: better(name, hooks) for name in sorted(found, key=lambda name: (not name.endswith("/loss"), name))}


def _best(curve: Curve, direction: Direction | None) -> Point | None:
    return None if direction is None else curve.least if direction == "low" else curve.greatest


def _fields(point: Point | None) -> dict[str, Any] | None:
    return None if point is None else asdict(point)


def _number(value: Any) -> str:
    """Return a number with all its digits; packed numbers of layers are not shown."""
    if isinstance(value, (int, float)):
        return repr(value)
    return value if value in NON_FINITE else ""


def _shown(value: Any) -> str:
    return cut(value if value == MISSING else json.dumps(value, default=str, ensure_ascii=False), _LONGEST_VALUE)
