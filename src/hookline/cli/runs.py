"""`hookline runs`: list the runs of a directory, with their names, outcomes and best values."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len

from hookline._console import is_terminal, print_line, printable
from hookline._text import duration_text, first_of
from hookline._words import nearest
from hookline.cli import one_line
from hookline.cli.arguments import JSON, REPEATED, argument, flag, positive
from hookline.cli.formatting import MAX_WIDTH, open_console, paragraph, print_json, table
from hookline.errors import HooklineError
from hookline.record.outcome import Outcome
from hookline.runs.alerts import verdict_on
from hookline.runs.direction import better
from hookline.runs.find import KILLED, RUNNING, RunFiles, list_runs
from hookline.runs.named import RUNS

# The columns from the most to the least important: those that do not fit the terminal are left out.
PRIORITY = ("id", "verdict", "outcome", "name", "best", "steps", "duration", "tags", "from", "started")
COLUMNS = ("id", "name", "tags", "verdict", "outcome", "best", "steps", "duration", "started", "from")
_LARGEST_FIRST = ("started", "steps", "duration")
_STYLES = {"broken": "red", "look at this": "yellow"}  # by verdict, otherwise by outcome
_OUTCOME_STYLES = {RUNNING: "green", "failed": "red", "non_finite": "red", KILLED: "yellow", "interrupted": "yellow"}
_MAX_CELL_WIDTHS = {"name": 32, "tags": 32, "verdict": 12, "outcome": 28, "best": 32, "from": 36}
_NARROW_CELL_WIDTHS = {**_MAX_CELL_WIDTHS, "name": 16, "tags": 16}
_WHOLE = ("id", "steps", "duration", "started")  # never cut
_MIN_ID_LENGTH = len("20261117-085800")
_MAX_SKIPPED = 5  # directories in the note

ARGUMENTS = (
    argument("directory", "DIR", "the directory of the runs (default: runs)", nargs="?", default=RUNS)
    | argument("--tag", "WORD", "only runs with this tag (may be repeated)", **REPEATED)
    | argument("--outcome", "OUTCOME", "only runs with this outcome, such as failed, running or killed")
    | argument("--name", "WORD", "only runs whose name contains this")
    | argument(
        "--sort", "KEY", "started, id, name, outcome, best, steps or duration (default: started)", default="started"
    )
    | flag("--reverse", "reverse the order")
    | argument("--limit", "N", "print at most N", type=positive)
    | JSON
)


def run(options: argparse.Namespace) -> int:
    """Print the runs that match the filters, the newest first or sorted by a key."""
    options.outcome = _check_outcome(options.outcome)
    is_new = options.directory == RUNS and not Path(RUNS).exists()  # nothing has been trained here yet
    runs, others = ([], []) if is_new else list_runs(options.directory)
    chosen = sort([record for record in runs if matches(record, options)], options.sort)
    chosen = list(reversed(chosen)) if options.reverse else chosen
    shown = chosen[: options.limit]
    if options.json:
        print_json([describe(record) for record in shown])
    elif shown:
        print_table([cells(record) for record in shown], [record.path.name for record in runs])
    else:
        paragraph(open_console(), _none_text(options, len(runs)), indent=0)
    if not options.json and len(shown) < len(chosen):
        paragraph(open_console(), f"{len(chosen) - len(shown)} more; --limit {len(chosen)} prints all", indent=0)
    if others:
        listed = first_of([path.name for path in others], _MAX_SKIPPED)
        what = "not a run, damaged, or written by a newer Hookline"
        print_line(one_line(f"hookline: skipped in {options.directory}/ ({what}): {listed}"), sys.stderr)
    return 0


def _check_outcome(given: str | None) -> str | None:
    """Return an outcome as run.json has it; it may be given as `show` prints it, too, with a hyphen."""
    outcome = None if given is None else given.replace("-", "_")
    if outcome not in (None, RUNNING, KILLED, *Outcome):
        raise HooklineError(f"--outcome {given}: {nearest(str(outcome), (RUNNING, KILLED, *Outcome))}")
    return outcome


def matches(record: RunFiles, options: argparse.Namespace) -> bool:
    """Return whether a run passes the filters of a command line."""
    named = options.name is None or options.name.lower() in (record.labels.name or "").lower()
    tagged = all(tag in record.labels.tags for tag in options.tag)
    return named and tagged and (options.outcome is None or record.outcome == options.outcome)


def sort(runs: Sequence[RunFiles], key: str) -> list[RunFiles]:
    """Sort runs by a key; those without a value come last. Times and counts begin with the largest.

    Values of different metrics cannot be compared: "best" sorts by the metric's name, then the best value first.
    """
    values: dict[str, Any] = {
        "started": lambda record: record.started,
        "id": lambda record: record.path.name,
        "name": lambda record: record.labels.name,
        "outcome": lambda record: record.ending,
        "best": _rank(runs) if key == "best" else None,
        "steps": lambda record: record.step,
        "duration": lambda record: record.seconds,
    }
    if key not in values:
        raise HooklineError(f"--sort {key}: {nearest(key, values)}")
    newest_first = sorted(runs, key=lambda record: record.path.name, reverse=True)
    keyed = [(values[key](record), record) for record in newest_first]
    known = sorted(
        (pair for pair in keyed if pair[0] is not None), key=lambda pair: pair[0], reverse=key in _LARGEST_FIRST
    )
    return [record for _, record in known] + [record for value, record in keyed if value is None]


def _rank(runs: Sequence[RunFiles]) -> Callable[[RunFiles], tuple[str, float] | None]:
    """Return the key to sort runs by metric and value; low values come first unless high ones are better."""
    hooks = [hook for record in runs for hook in record.run.get("hooks", [])]
    metrics = {record.score.metric for record in runs if record.score is not None}
    directions = {metric: better(metric, hooks) for metric in metrics}

    def rank(record: RunFiles) -> tuple[str, float] | None:
        if record.score is None or math.isnan(record.score.value):
            return None
        metric, value = record.score.metric, record.score.value
        return metric, -value if directions[metric] == "high" else value

    return rank


def describe(record: RunFiles) -> dict[str, Any]:
    """Return a run for programs."""
    verdict, score = verdict_on(record), record.score  # a verdict may read files whole, of which a score needs the ends
    return {
        "run_id": record.run_id,
        "path": str(record.path),
        "name": record.labels.name,
        "tags": list(record.labels.tags),
        "notes": record.labels.notes,
        "verdict": verdict,
        "outcome": record.outcome,
        "reason": record.run.get("reason"),
        "score": None
        if score is None
        else {"metric": score.metric, "value": score.value, "kind": "best" if score.is_best else "last"},
        "steps": record.step,
        "seconds": record.seconds,
        "started": record.run.get("started"),
        "attempts": len(record.run.get("attempts", [])),
        "lineage": record.run.get("lineage"),
    }


def cells(record: RunFiles) -> dict[str, str]:
    """Return the cells of a run's row, by column."""
    verdict, score, lineage = verdict_on(record), record.score, record.run.get("lineage")
    best = "" if score is None else f"{score.metric} {score.value:.4g}{'' if score.is_best else ' (last)'}"
    source = f"{lineage.get('run_id')} @ {lineage.get('step')}" if lineage else ""
    return {
        "id": record.path.name,
        "name": record.labels.name or "",
        "tags": ", ".join(record.labels.tags),
        "verdict": verdict["health"] if verdict else "-",
        "outcome": record.ending,
        "best": best,
        "steps": "" if record.step is None else f"{record.step:,}",
        "duration": "" if record.seconds is None else duration_text(record.seconds),
        "started": "" if record.started is None else f"{record.started:%Y-%m-%d %H:%M}",
        "from": source,
    }


def print_table(rows: Sequence[dict[str, str]], ids: Sequence[str]) -> None:
    """Print the columns that have a value and fit the terminal; files and pipes get all of them.

    In a narrow terminal, ids are cut to the shortest form that is unique among the `ids` of the directory.
    """
    console = open_console()
    widths = _widths(rows, {})
    if not is_terminal(sys.stdout):
        console.width = MAX_WIDTH
    if (full := _full_width(widths)) > min(console.width, MAX_WIDTH):
        widths = _widths(rows, _MAX_CELL_WIDTHS)
        full = _full_width(widths)
    if not is_terminal(sys.stdout):
        console.width = full
    if full > console.width:
        rows = [{**row, "id": _short_id(row["id"], ids), "outcome": row["outcome"].partition(" ")[0]} for row in rows]
        widths = _widths(rows, _NARROW_CELL_WIDTHS)
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
    styled = [([row[name] for name in columns], _style(row)) for row in rows]
    table(console, columns, styled, width=console.width)
    if hidden := [name for name in widths if name not in columns]:
        paragraph(
            console, f"hidden because the terminal is too narrow: {', '.join(hidden)}; --json has everything", indent=0
        )


def _full_width(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + 2 * (len(widths) - 1)


def _style(row: Mapping[str, str]) -> str:
    return _STYLES.get(row["verdict"], _OUTCOME_STYLES.get(row["outcome"], ""))


def _widths(rows: Sequence[dict[str, str]], widest: Mapping[str, int]) -> dict[str, int]:
    """Return the width of each column that has a value."""
    widths = {
        name: max(cell_len(text) for text in (name, *(printable(row[name]) for row in rows)))
        for name in COLUMNS
        if any(row[name] for row in rows)
    }
    return {name: min(width, widest.get(name, width)) for name, width in widths.items()}


def _short_id(run_id: str, others: Sequence[str]) -> str:
    """Return the prefix of an id that is unique among these; for our ids, the time."""
    for length in range(_MIN_ID_LENGTH, len(run_id)):
        if sum(other.startswith(run_id[:length]) for other in others) == 1:
            return run_id[:length]
    return run_id


def _none_text(options: argparse.Namespace, count: int) -> str:
    if not count:
        return f"no runs yet in {options.directory}/"
    there = "is 1" if count == 1 else f"are {count}"
    return f"no run in {options.directory}/ matches the filters; without them there {there}"
