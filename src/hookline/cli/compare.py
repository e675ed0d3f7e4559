"""`hookline compare`: which run is better, what differs between runs, and the step at which they diverge."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from hookline._console import printable
from hookline._text import short_number
from hookline.cli.arguments import JSON, RUNS
from hookline.cli.charts import MIN_POINTS, draw_chart
from hookline.cli.formatting import (
    MAX_WIDTH,
    bounded,
    heading,
    labeled,
    open_console,
    paragraph,
    print_json,
    shorten,
    table,
)
from hookline.errors import HooklineError
from hookline.runs.compare import Difference, Divergence, find_differences, find_divergence, likely_causes, value_text
from hookline.runs.find import RunFiles, run_labels
from hookline.runs.ranking import LOSSES, Ranking, Row, Value, best_point, change_text, describe_ranking, rank_runs
from hookline.runs.summary import RunSummary

_MAX_DIFFERENCES, _MAX_CAUSES, _MAX_METRICS = 40, 5, 12  # enough for a person to read; --json has everything
_MAX_NAME_LENGTH, _MIN_TITLE_LENGTH, _MIN_CELL_WIDTH = 60, 12, 14  # so that five runs fit 80 columns
_NO_DIVERGENCE = dict.fromkeys(field.name for field in fields(Divergence))  # For runs without a common step.

ARGUMENTS = RUNS | JSON


def run(options: argparse.Namespace) -> int:
    """Print the comparison of two or more runs; the others are compared with the first."""
    files = options.runs
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
    ranking = rank_runs(summaries, names, divergences)
    if options.json:
        print_json(describe(files, summaries, differences, divergences, causes, ranking))
        return 0
    console = open_console()
    print_ranking(console, ranking)
    print_metrics(console, ranking)
    print_divergences(console, names, divergences, causes)
    print_differences(console, names, differences)
    print_curves(console, names, summaries)
    return 0


def describe(
    files: Sequence[RunFiles],
    summaries: Sequence[RunSummary],
    differences: Sequence[Difference],
    divergences: Sequence[Divergence | None],
    causes: Sequence[Sequence[str]],
    ranking: Ranking,
) -> dict[str, Any]:
    """Return a comparison for programs."""
    return {
        **describe_ranking(ranking, summaries),
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
            row.metric: [
                None if curve is None else {"last": curve.last, "best": best_point(curve, row.direction)}
                for curve in (summary.curves.get(row.metric) for summary in summaries)
            ]
            for row in ranking.rows
            if row.kind == "last"
        },
    }


def print_divergences(
    console: Console, names: Sequence[str], divergences: Sequence[Divergence | None], causes: Sequence[Sequence[str]]
) -> None:
    """Print for each run where it diverges from the first one, with possible causes."""
    console.print()
    for name, divergence, why in zip(names[1:], divergences, causes, strict=True):
        heading(console, f"{names[0]} and {name}")
        if divergence is None:
            paragraph(console, "have no step in common")
            continue
        paragraph(console, str(replace(divergence, name=bounded(divergence.name, 100))))
        for index, cause in enumerate(why[:_MAX_CAUSES]):
            labeled(console, "" if index else "likely", bounded(cause), width=8)
        if len(why) > _MAX_CAUSES:
            labeled(console, "", f"and {len(why) - _MAX_CAUSES} more below", width=8)


def print_differences(console: Console, names: Sequence[str], differences: Sequence[Difference]) -> None:
    """Print what differs between the runs, by section."""
    console.print()
    heading(console, "differences", "" if differences else "none in config, hooks, environment and git")
    if not differences:
        return
    rows: list[tuple[str, Sequence[str]]] = []
    listed = []
    widest = max(console.width * 2 // 3 // len(names) - 2, _MIN_CELL_WIDTH)
    section = ""
    for difference in differences[:_MAX_DIFFERENCES]:
        cells = [bounded(value_text(value)) for value in difference.values]
        if max(map(len, cells)) > widest:
            listed.append((f"{difference.section}: {bounded(difference.key, 100)}", cells))
            continue
        if difference.section != section:
            rows.append((difference.section, [""] * len(names)))
            section = difference.section
        rows.append((f"  {bounded(difference.key, 100)}", cells))
    if rows:
        print_side_by_side(console, names, rows)
    for key, cells in listed:  # too long for a column
        paragraph(console, key, indent=0)
        for name, cell in zip(names, cells, strict=True):
            labeled(console, name, cell, indent=2, width=max(map(len, names)) + 2)
    if len(differences) > _MAX_DIFFERENCES:
        paragraph(console, f"and {len(differences) - _MAX_DIFFERENCES} more; --json has all", indent=0)


def print_curves(console: Console, names: Sequence[str], summaries: Sequence[RunSummary]) -> None:
    """Overlay the losses of all runs in one chart."""
    for metric in LOSSES:
        curves = [run.curves.get(metric) for run in summaries]
        drawn = {
            name: None if curve is None or not curve.finite else curve
            for name, curve in zip(names, curves, strict=True)
        }
        if any(curve is not None and curve.finite >= MIN_POINTS for curve in curves):
            console.print()
            draw_chart(console, drawn, title=metric)


def print_ranking(console: Console, ranking: Ranking) -> None:
    """Print which run is better, and the reasons."""
    for line in textwrap.wrap(printable(ranking.headline), max(min(console.width, MAX_WIDTH), 20)):
        console.print(Text(line, "bold"))
    for note in ranking.notes:
        paragraph(console, note, hanging=2)


def print_metrics(console: Console, ranking: Ranking) -> None:
    """Print the last value of each run or group side by side, then the best one of metrics with a direction."""
    names = [group.name for group in ranking.groups]
    for title, kind in (("last value", "last"), ("best value (step)", "best")):
        rows = [row for row in ranking.rows if row.kind == kind]
        different = [row for row in rows if not row.is_same]
        if not rows:
            continue
        console.print()
        heading(console, title, "" if len(names) < 2 or not different else f"changes are against {names[0]}")
        if different:
            print_side_by_side(console, names, _metric_cells(different[:_MAX_METRICS]))
        if len(different) > _MAX_METRICS:
            paragraph(console, f"and {len(different) - _MAX_METRICS} more metrics; --json has all", indent=0)
        if same := [f"{row.metric} {_value_text(row, row.values[0])}" for row in rows if row.is_same]:
            more = f" and {len(same) - _MAX_METRICS} more; --json has all" if len(same) > _MAX_METRICS else ""
            labeled(console, "equal", f"{bounded(', '.join(same[:_MAX_METRICS]), 1000)}{more}", indent=0, width=7)


def _metric_cells(rows: Sequence[Row]) -> list[tuple[str, list[Text]]]:
    """Return the rows of a table: values with their changes in a separate column; the best one is bold."""
    values = [[_value_text(row, value) for value in row.values] for row in rows]
    widths = [max(map(len, column)) for column in zip(*values, strict=True)]
    cells: list[tuple[str, list[Text]]] = []
    for row, texts in zip(rows, values, strict=True):
        cells.append((row.metric, []))
        for place, (text, width, change) in enumerate(zip(texts, widths, row.changes, strict=True)):
            cell = Text().append(text, "bold" if place == row.best else "")
            cells[-1][1].append(
                cell if change is None else cell.append(f"{' ' * (width - len(text) + 2)}{change_text(change)}")
            )
    return cells


def _value_text(row: Row, value: Value | None) -> str:
    """Return a value, with its step if it is the best one of a run, or with the range of a group."""
    if value is None:
        return "-"
    least, greatest = short_number(value.least), short_number(value.greatest)
    if value.runs > 1:
        return short_number(value.mean) + (f" ({least} to {greatest})" if least != greatest else "")
    return f"{short_number(value.mean)} ({value.step:,})" if row.kind == "best" else short_number(value.mean)


def print_side_by_side(
    console: Console, names: Sequence[str], rows: Sequence[tuple[str, Sequence[str | Text]]]
) -> None:
    """Print a column per run; those that do not fit the terminal follow in further tables with the same rows.

    Args:
        console: Where to print.
        names: Different names of the runs.
        rows: A key, and a cell for each run.
    """
    short = shorten(names, max(console.width * 2 // 3 // len(names) - 2, _MIN_TITLE_LENGTH))
    # A name that fits its column is not shortened.
    values = [max(cell_len(str(cell)) for cell in column) for column in zip(*(cells for _, cells in rows), strict=True)]
    titles = [name if cell_len(name) <= width else cut for name, cut, width in zip(names, short, values, strict=True)]
    columns = zip(titles, *(map(str, cells) for _, cells in rows), strict=True)
    widths = [max(cell_len(printable(text)) for text in column) + 2 for column in columns]
    # Keys are cut if the runs would otherwise not fit side by side.
    keys = shorten([key for key, _ in rows], max(console.width // 3, console.width - 2 - sum(widths)))
    room = min(console.width, MAX_WIDTH) + 2 - (max(cell_len(printable(key)) for key in keys) + 2)
    for tables in range(1, len(names) + 1):
        step = math.ceil(len(names) / tables)
        if all(sum(widths[begin : begin + step]) <= room for begin in range(0, len(names), step)):
            break
    for begin in range(0, len(names), step):
        if begin:
            console.print()
        heads = ("", *titles[begin : begin + step])
        shown = [
            ([key, *cells[begin : begin + step]], "" if any(cells) else "dim")
            for key, (_, cells) in zip(keys, rows, strict=True)
        ]
        table(console, {title: {"overflow": "fold"} for title in heads}, shown, width=console.width)
