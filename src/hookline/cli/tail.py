"""`hookline tail`: print the last metrics and events of a run, and follow them until the run ends."""

from __future__ import annotations

import argparse
import time
from typing import Any

from rich.console import Console
from rich.text import Text

from hookline._console import printable
from hookline.cli.arguments import JSON, RUN, argument, positive
from hookline.cli.formatting import open_console, print_json
from hookline.errors import written
from hookline.record.format import EVENTS_FILE, METRICS_FILE
from hookline.record.json_lines import as_number
from hookline.runs.find import KILLED, RUNNING, RunFiles

POLL_SECONDS = 0.5
_MAX_OTHERS = 3  # metrics of a row that has neither a loss nor a value of a validation
_LOSSES = ("train/loss", "loss")
_FIELDS = ("step", "epoch", "time")
_MAX_LINE_LENGTH = 400  # characters of a line in a pipe

ARGUMENTS = (
    RUN | argument("--lines", "N", "print the last N rows first (default: 10)", type=positive, default=10) | JSON
)


def run(options: argparse.Namespace) -> int:
    """Print rows until the run ends or the user presses Ctrl-C."""
    run, console, shown, was_running = options.run, open_console(), slice(-options.lines, None), True
    files = [run.follow(name) for name in (METRICS_FILE, EVENTS_FILE)]
    try:
        while True:
            outcome = run.outcome  # before the rows: whatever was written before the end is printed, too
            for row in sorted((row for file in files for row in next(file)), key=_time_of)[shown]:
                print_row(console, row, options.json)
            console.file.flush()
            if outcome not in (RUNNING, KILLED) or (outcome == KILLED and not was_running):
                print_end(console, run, options.json)
                return 0
            was_running = outcome == RUNNING  # twice: a run that begins takes its lock before the lock file names it
            time.sleep(POLL_SECONDS)
            run, shown = RunFiles.read(run.path), slice(None)
    except KeyboardInterrupt:
        return 0


def print_row(console: Console, row: dict[str, Any], as_json: bool) -> None:
    """Print a row of metrics or an event on one line."""
    if as_json:
        print_json(row, indent=None)
        return
    step = row.get("step")
    place = f"step {step:>7,}  " if isinstance(step, int) else f"{'':14}"
    if "kind" in row:
        fields = ", ".join(f"{key} {_short(value)}" for key, value in row.items() if key not in ("kind", *_FIELDS))
        _print(console, Text.assemble((place, "dim"), (_clean(str(row["kind"])), "bold"), f"  {_clean(fields)}"))
    elif metrics := choose_metrics(row):
        _print(console, Text.assemble((place, "dim"), _clean("  ".join(metrics))))


def choose_metrics(row: dict[str, Any]) -> list[str]:
    """Return the loss and the metrics of a validation; for a row without them, its first other values."""
    if "resumed" in row:
        return ["resumed"]
    names = [name for name in row if name in _LOSSES] + [name for name in row if name.startswith("val/")]
    others = [name for name in row if name not in _FIELDS]
    shown = [f"{name} {_short(row[name])}" for name in names or others[:_MAX_OTHERS]]
    return shown + (["…"] if not names and len(others) > _MAX_OTHERS else [])


def print_end(console: Console, record: RunFiles, as_json: bool) -> None:
    """Print how the run ended."""
    reason = record.run.get("reason")
    if as_json:
        print_json({"outcome": record.outcome, "reason": reason}, indent=None)
        return
    because = "" if not reason else f": {reason}"
    what = "the run was killed" if record.outcome == KILLED else f"the run has ended, {record.outcome}{because}"
    _print(console, Text(_clean(what), "bold"))


def _short(value: Any) -> str:
    """Return a number with few digits, and everything else as messages show it."""
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else written(value)


def _clean(text: str) -> str:
    return " ".join(printable(text[:_MAX_LINE_LENGTH]).split("\n"))


def _print(console: Console, line: Text) -> None:
    if console.is_terminal:
        line.truncate(console.width, overflow="ellipsis")
    console.print(line, soft_wrap=True)


def _time_of(row: dict[str, Any]) -> float:
    return as_number(row.get("time")) or 0.0
