"""`hookline runs`: list the runs of a directory, what they are called, how they ended and how good they are."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.cells import cell_len

from hookline._console import is_terminal, print_line, printable
from hookline._words import nearest
from hookline.cli import one_line
from hookline.cli.find_run import RUNS
from hookline.cli.formatting import duration_text, open_console, paragraph, print_json, table
from hookline.errors import HooklineError
from hookline.record.json_lines import mappings_in
from hookline.record.outcome import Outcome
from hookline.record.runs import KILLED, RUNNING, RunFiles, list_runs
from hookline.report.direction import better

# The columns from the most to the least important: those that do not fit the terminal are left out.
PRIORITY = ("id", "outcome", "name", "best", "steps", "duration", "tags", "from", "started")
COLUMNS = ("id", "name", "tags", "outcome", "best", "steps", "duration", "started", "from")
SORT_KEYS = ("started", "id", "name", "outcome", "best", "steps", "duration")
_LARGEST_FIRST = ("started", "steps", "duration")
_STYLES = {RUNNING: "green", "failed": "red", "non_finite": "red", KILLED: "yellow", "interrupted": "yellow"}
_WIDEST_CELL = {"name": 32, "tags": 32, "outcome": 28, "best": 32, "from": 36}
_NARROW_CELL = {**_WIDEST_CELL, "name": 16, "tags": 16}
_WHOLE = ("id", "steps", "duration", "started")  # never cut
_SHORTEST_ID = len("20261117-085800")
_MOST_SKIPPED = 5  # directories in the note


def run(options: argparse.Namespace) -> int:
    """Print the runs that the filters leave, the newest first or sorted by a key."""
    options.outcome = _check_outcome(options.outcome)
    is_new = options.directory == RUNS and not Path(RUNS).exists()  # nothing has been trained here yet
    found, others = ([], []) if is_new else list_runs(options.directory)
    chosen = sort([one for one in found if matches(one, options)], options.sort)
    chosen = list(reversed(chosen)) if options.reverse else chosen
    shown = chosen[: options.limit]
    if options.json:
        print_json([describe(one) for one in shown])
    elif shown:
        print_table([cells(one) for one in shown], [one.path.name for one in found])
    else:
        paragraph(open_console(), _none_text(options, len(found)), indent=0)
    if not options.json and len(shown) < len(chosen):
        paragraph(open_console(), f"{len(chosen) - len(shown)} more; --limit {len(chosen)} prints all", indent=0)
    if others:
        listed = ", ".join(path.name for path in others[:_MOST_SKIPPED])
        more = f" and {len(others) - _MOST_SKIPPED} more" if len(others) > _MOST_SKIPPED else ""
        what = "not a run, damaged, or of a newer Hookline"
        print_line(one_line(f"hookline: skipped in {options.directory}/ ({what}): {listed}{more}"), sys.stderr)
    return 0


def _check_outcome(given: str | None) -> str | None:
    """Return an outcome as run.json has it; it may be given as `show` prints it, too, with a hyphen."""
    outcome = None if given is None else given.replace("-", "_")
    if outcome not in (None, RUNNING, KILLED, *Outcome):
        raise HooklineError(f"--outcome {given}: {nearest(str(outcome), (RUNNING, KILLED, *Outcome))}")
    return outcome


def matches(one: RunFiles, options: argparse.Namespace) -> bool:
    """Return whether a run passes the filters of a command line."""
    named = options.name is None or options.name.lower() in (one.labels.name or "").lower()
    tagged = all(tag in one.labels.tags for tag in options.tag)
    return named and tagged and (options.outcome is None or one.outcome == options.outcome)


def sort(runs: Sequence[RunFiles], key: str) -> list[RunFiles]:
    """Sort runs by a key; those without a value come last. Times and counts begin with the largest.

    Values of different metrics cannot be compared: "best" sorts by the metric's name, then the best value first.
    """
    if key not in SORT_KEYS:
        raise HooklineError(f"--sort {key}: {nearest(key, SORT_KEYS)}")
    values: dict[str, Any] = {
        "started": lambda one: one.started,
        "id": lambda one: one.path.name,
        "name": lambda one: one.labels.name,
        "outcome": lambda one: one.ending,
        "best": _rank(runs),
        "steps": lambda one: one.step,
        "duration": lambda one: one.seconds,
    }
    keyed = [(values[key](one), one) for one in sorted(runs, key=lambda one: one.path.name, reverse=True)]
    known = sorted(
        (pair for pair in keyed if pair[0] is not None), key=lambda pair: pair[0], reverse=key in _LARGEST_FIRST
    )
    return [one for _, one in known] + [one for value, one in keyed if value is None]


def _rank(runs: Sequence[RunFiles]) -> Callable[[RunFiles], tuple[str, float] | None]:
    """Return what sorts runs by their metric and its value; low values come first unless high ones are better."""
    hooks = [hook for one in runs for hook in mappings_in(one.run.get("hooks"))]
    directions = {name: better(name, hooks) for name in {one.score.metric for one in runs if one.score is not None}}

    def rank(one: RunFiles) -> tuple[str, float] | None:
        if one.score is None or math.isnan(one.score.value):
            return None
        metric, value = one.score.metric, one.score.value
        return metric, -value if directions[metric] == "high" else value

    return rank


def describe(one: RunFiles) -> dict[str, Any]:
    """Return a run for programs."""
    score = one.score
    lineage = one.run.get("lineage")
    return {
        "run_id": one.run_id,
        "path": str(one.path),
        "name": one.labels.name,
        "tags": list(one.labels.tags),
        "notes": one.labels.notes,
        "outcome": one.outcome,
        "reason": one.run.get("reason"),
        "score": None
        if score is None
        else {"metric": score.metric, "value": score.value, "kind": "best" if score.is_best else "last"},
        "steps": one.step,
        "seconds": one.seconds,
        "started": one.run.get("started"),
        "attempts": len(one.run["attempts"]) if isinstance(one.run.get("attempts"), list) else None,
        "lineage": lineage if isinstance(lineage, dict) else None,
    }


def cells(one: RunFiles) -> dict[str, str]:
    """Return the cells of a run's row, by column."""
    score, lineage = one.score, one.run.get("lineage")
    best = "" if score is None else f"{score.metric} {score.value:.4g}{'' if score.is_best else ' (last)'}"
    source = f"{lineage.get('run_id')} @ {lineage.get('step')}" if isinstance(lineage, dict) else ""
    return {
        "id": one.path.name,
        "name": one.labels.name or "",
        "tags": ", ".join(one.labels.tags),
        "outcome": one.ending,
        "best": best,
        "steps": "" if one.step is None else f"{one.step:,}",
        "duration": duration_text(one.seconds),
        "started": started_text(one.started),
        "from": source,
    }


def print_table(rows: Sequence[dict[str, str]], ids: Sequence[str]) -> None:
    """Print the columns that have a value and fit the terminal; files and pipes get all of them.

    In a narrow terminal ids are as short as tells them from all `ids` of the directory.
    """
    console = open_console()
    widths = _widths(rows, _WIDEST_CELL)
    full = sum(widths.values()) + 2 * (len(widths) - 1)
    if not is_terminal(sys.stdout):
        console.width = full
    if full > console.width:
        rows = [{**row, "id": _short_id(row["id"], ids), "outcome": row["outcome"].partition(" ")[0]} for row in rows]
        widths = _widths(rows, _NARROW_CELL)
    kept: list[str] = []
    left = console.width + 2
    for name in PRIORITY:
        if name in widths and (not kept or widths[name] + 2 <= left):
            kept.append(name)
            left -= widths[name] + 2
    columns: dict[str, dict[str, Any]] = {
        name: {"justify": "right" if name in ("steps", "duration") else "left", "overflow": "fold"}
        if name in _WHOLE
        else {"no_wrap": True, "overflow": "ellipsis", "max_width": widths[name]}
        for name in COLUMNS
        if name in kept
    }
    styled = [([row[name] for name in columns], _STYLES.get(row["outcome"], "")) for row in rows]
    table(console, columns, styled, width=console.width)
    if hidden := [name for name in widths if name not in columns]:
        paragraph(console, f"not shown for lack of width: {', '.join(hidden)}; --json has everything", indent=0)


def _widths(rows: Sequence[dict[str, str]], widest: Mapping[str, int]) -> dict[str, int]:
    """Return the width of each column that has a value."""
    widths = {
        name: max(cell_len(text) for text in (name, *(printable(row[name]) for row in rows)))
        for name in COLUMNS
        if any(row[name] for row in rows)
    }
    return {name: min(width, widest.get(name, width)) for name, width in widths.items()}


def _short_id(run_id: str, others: Sequence[str]) -> str:
    """Return the beginning of an id that names the run among these; that of ours is the time."""
    for length in range(_SHORTEST_ID, len(run_id)):
        if sum(other.startswith(run_id[:length]) for other in others) == 1:
            return run_id[:length]
    return run_id


def started_text(started: datetime | None) -> str:
    """Return a time without its seconds."""
    return "" if started is None else f"{started:%Y-%m-%d %H:%M}"


def _none_text(options: argparse.Namespace, count: int) -> str:
    if not count:
        return f"no runs yet in {options.directory}/"
    there = "is 1" if count == 1 else f"are {count}"
    return f"no run in {options.directory}/ passes the filters; without them there {there}"
