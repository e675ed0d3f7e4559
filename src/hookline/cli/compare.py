"""`hookline compare`: what differs between runs, their curves over each other, and the step at which they diverge."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console

from hookline._console import printable
from hookline.cli.arguments import JSON, RUNS
from hookline.cli.charts import MIN_POINTS, draw_chart
from hookline.cli.formatting import (
    LOSSES,
    cut,
    heading,
    labeled,
    metric_order,
    open_console,
    paragraph,
    point_text,
    print_json,
    shorten,
    table,
)
from hookline.errors import HooklineError
from hookline.runs.compare import Difference, Divergence, find_differences, find_divergence, likely_causes, value_text
from hookline.runs.curves import Curve, Point
from hookline.runs.direction import Direction, better
from hookline.runs.find import RunFiles, run_labels
from hookline.runs.summary import RunSummary

_MAX_DIFFERENCES, _MAX_CAUSES, _MAX_METRICS = 40, 5, 12  # what a person reads; --json has all
_MAX_NAME_LENGTH, _MAX_TITLE_LENGTH, _MIN_CELL_WIDTH = 60, 12, 14  # so that five runs fit 80 columns
_NO_DIVERGENCE = dict.fromkeys(field.name for field in fields(Divergence))  # of runs without a common step

ARGUMENTS = RUNS | JSON


def run(options: argparse.Namespace) -> int:
    """Print the comparison of two or more runs; the others are compared with the first."""
    files = list({path.resolve(): RunFiles.read(path) for path in map(Path, options.runs)}.values())
    if len(files) < 2:
        raise HooklineError("compare needs at least two runs; `hookline runs` lists them")
    summaries = [RunSummary.read(record, numbers=True) for record in files]
    for record in files:
        record.warn_of_damage(ignore_torn=True)
    differences = find_differences(summaries)
    first, *others = summaries
    divergences = [find_divergence(first, other) for other in others]
    causes = [
        [] if divergence is None else likely_causes(first, other, divergence, find_differences([first, other]))
        for other, divergence in zip(others, divergences, strict=True)
    ]
    names = shorten(run_labels(files), _MAX_NAME_LENGTH)
    if options.json:
        print_json(describe(files, summaries, differences, divergences, causes))
        return 0
    console = open_console()
    print_divergences(console, names, divergences, causes)
    print_differences(console, names, differences)
    print_curves(console, names, summaries)
    print_metrics(console, names, summaries)
    return 0


def describe(
    files: Sequence[RunFiles],
    summaries: Sequence[RunSummary],
    differences: Sequence[Difference],
    divergences: Sequence[Divergence | None],
    causes: Sequence[Sequence[str]],
) -> dict[str, Any]:
    """Return a comparison for programs."""
    return {
        "runs": [{"run_id": record.run_id, "name": record.labels.name, "path": str(record.path)} for record in files],
        "differences": differences,
        "divergences": [
            {
                "run_id": record.run_id,
                **(_NO_DIVERGENCE if divergence is None else asdict(divergence)),
                "likely_causes": list(why),
            }
            for record, divergence, why in zip(files[1:], divergences, causes, strict=True)
        ],
        "metrics": {
            name: [
                None if curve is None else {"last": curve.last, "best": _best(curve, direction)}
                for curve in _curves(summaries, name)
            ]
            for name, direction in _directions(summaries).items()
        },
    }


def print_divergences(
    console: Console, names: Sequence[str], divergences: Sequence[Divergence | None], causes: Sequence[Sequence[str]]
) -> None:
    """Print for each run where it diverges from the first one, and why that may be."""
    for name, divergence, why in zip(names[1:], divergences, causes, strict=True):
        heading(console, f"{names[0]} and {name}")
        if divergence is None:
            paragraph(console, "have no step in common")
            continue
        paragraph(console, str(replace(divergence, name=cut(divergence.name, 100))))
        for index, cause in enumerate(why[:_MAX_CAUSES]):
            labeled(console, "" if index else "likely", cut(cause), width=8)
        if len(why) > _MAX_CAUSES:
            labeled(console, "", f"and {len(why) - _MAX_CAUSES} more below", width=8)


def print_differences(console: Console, names: Sequence[str], differences: Sequence[Difference]) -> None:
    """Print what is not the same in all runs, by section."""
    console.print()
    heading(console, "differences", "" if differences else "none in config, hooks, environment and git")
    if not differences:
        return
    rows: list[tuple[str, Sequence[str]]] = []
    listed = []
    widest = max(console.width * 2 // 3 // len(names) - 2, _MIN_CELL_WIDTH)
    section = ""
    for difference in differences[:_MAX_DIFFERENCES]:
        cells = [cut(value_text(value)) for value in difference.values]
        if max(map(len, cells)) > widest:
            listed.append((f"{difference.section}: {cut(difference.key, 100)}", cells))
            continue
        if difference.section != section:
            rows.append((difference.section, [""] * len(names)))
            section = difference.section
        rows.append((f"  {cut(difference.key, 100)}", cells))
    if rows:
        print_side_by_side(console, names, rows)
    for key, cells in listed:  # too long for a column
        paragraph(console, key, indent=0)
        for name, cell in zip(names, cells, strict=True):
            labeled(console, name, cell, indent=2, width=max(map(len, names)) + 2)
    if len(differences) > _MAX_DIFFERENCES:
        paragraph(console, f"and {len(differences) - _MAX_DIFFERENCES} more; --json has all", indent=0)


def print_curves(console: Console, names: Sequence[str], summaries: Sequence[RunSummary]) -> None:
    """Draw the losses of all runs over each other."""
    for metric in LOSSES:
        curves = [run.curves.get(metric) for run in summaries]
        drawn = {
            name: None if curve is None or not curve.finite else curve
            for name, curve in zip(names, curves, strict=True)
        }
        if any(curve is not None and curve.finite >= MIN_POINTS for curve in curves):
            console.print()
            draw_chart(console, drawn, title=metric)


def print_metrics(console: Console, names: Sequence[str], summaries: Sequence[RunSummary]) -> None:
    """Print the last value of each run side by side, then the best one of metrics whose better direction is known."""
    metrics = _directions(summaries)
    shown = dict(list(metrics.items())[:_MAX_METRICS])
    last = [
        (name, ["-" if curve is None else point_text(curve.last, False) for curve in _curves(summaries, name)])
        for name in shown
    ]
    best = [
        (name, ["-" if curve is None else point_text(_best(curve, direction)) for curve in _curves(summaries, name)])
        for name, direction in shown.items()
        if direction is not None
    ]
    for title, rows in (("last value", last), ("best value (step)", best)):
        if rows:
            console.print()
            heading(console, title)
            print_side_by_side(console, names, rows)
    if len(metrics) > len(shown):
        paragraph(console, f"and {len(metrics) - len(shown)} more metrics; --json has all", indent=0)


def print_side_by_side(console: Console, names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Print a column per run; those that do not fit the terminal follow in further tables with the same rows.

    Args:
        console: Where to print.
        names: Different names of the runs.
        rows: A key, and a cell for each run.
    """
    titles = shorten(names, _MAX_TITLE_LENGTH)
    width = max(cell_len(printable(text)) for text in (*titles, *(cell for _, cells in rows for cell in cells))) + 2
    # Keys are cut if otherwise the runs would not fit beside each other.
    keys = shorten([key for key, _ in rows], max(console.width // 3, console.width - 2 - width * len(names)))
    key_width = max(cell_len(printable(key)) for key in keys) + 2
    tables = math.ceil(len(names) / max((console.width - key_width) // width, 1))
    step = math.ceil(len(names) / tables)
    for begin in range(0, len(names), step):
        if begin:
            console.print()
        columns = ("", *titles[begin : begin + step])
        shown = [
            ([key, *cells[begin : begin + step]], "" if any(cells) else "dim")
            for key, (_, cells) in zip(keys, rows, strict=True)
        ]
        table(console, {title: {"overflow": "fold"} for title in columns}, shown, width=console.width)


def _curves(summaries: Sequence[RunSummary], metric: str) -> list[Curve | None]:
    return [summary.curves.get(metric) for summary in summaries]


def _directions(summaries: Sequence[RunSummary]) -> dict[str, Direction | None]:
    """Return the metrics that runs have, the losses first, and which direction is better."""
    hooks = [hook for summary in summaries for hook in summary.hooks]
    names = sorted({name for summary in summaries for name in summary.curves}, key=metric_order)
    return {name: better(name, hooks) for name in names}


def _best(curve: Curve, direction: Direction | None) -> Point | None:
    return None if direction is None else curve.least if direction == "low" else curve.greatest
