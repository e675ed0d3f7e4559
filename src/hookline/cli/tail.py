"""`hookline tail`: print the last metrics and events of a run, and follow them until the run ends."""

from __future__ import annotations

import argparse
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from hookline._console import printable
from hookline._fs import open_to_read
from hookline._sizes import line_limit
from hookline.cli.arguments import JSON, RUN, argument, positive
from hookline.cli.formatting import open_console, print_json
from hookline.errors import written
from hookline.record.json_lines import as_number, parse_lines, read_blocks, whole_end
from hookline.runs.find import KILLED, RUNNING, RunFiles

POLL_SECONDS = 0.5
_FIRST_BYTES = 1 << 20  # of each file, for the lines that are printed first
_MAX_OTHERS = 3  # metrics of a row that has neither a loss nor a value of a validation
_LOSSES = ("train/loss", "loss")
_FIELDS = ("step", "epoch", "time")
_MAX_LINE_LENGTH = 400  # characters of a line in a pipe

ARGUMENTS = RUN | argument("--lines", "N", "print the last N first (10)", type=positive, default=10) | JSON


def run(options: argparse.Namespace) -> int:
    """Print rows until the run ends or Ctrl-C, which is how one leaves a run that continues."""
    path = RunFiles.read(options.run).path
    console = open_console()
    files = [FollowedFile(path / f"{name}.jsonl") for name in ("metrics", "events")]
    rows = sorted((row for file in files for row in file.read_last()), key=_time_of)[-options.lines :]
    try:
        was_running = True
        while True:
            # The outcome is read before the rows: whatever was written before the end is printed, too.
            record = RunFiles.read(path)
            rows += sorted((row for file in files for row in file.read_new()), key=_time_of)
            for row in rows:
                print_row(console, row, options.json)
            console.file.flush()
            if record.outcome not in (RUNNING, KILLED) or (record.outcome == KILLED and not was_running):
                print_end(console, record, options.json)
                return 0
            was_running = record.outcome == RUNNING  # twice, because a run that begins locks before it says so
            rows = []
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        return 0


class FollowedFile:
    """Reads the whole lines that are appended to a file; also if it is truncated or replaced, or does not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place = 0
        self._inode: int | None = None

    def read_last(self) -> list[dict[str, Any]]:
        """Return the last rows, and continue behind them."""
        with suppress(OSError):
            self._place = max(self.path.stat().st_size - _FIRST_BYTES, 0)
        skip_first = self._place > 0  # it begins in the middle of a line
        return self.read_new()[skip_first:]

    def read_new(self) -> list[dict[str, Any]]:
        """Return the rows since the last call; a line that is not whole yet is left for the next one."""
        try:
            with open_to_read(self.path) as file:
                status = os.fstat(file.fileno())
                if status.st_size < self._place or self._inode not in (None, status.st_ino):
                    self._place = 0
                self._inode = status.st_ino
                begin, end = self._place, whole_end(file, lambda: True)
                self._place = max(begin, end)
                blocks = read_blocks(file, begin, end, line_limit(self.path.name))
                return [row for _, text in blocks for _, rows, _ in parse_lines(text.split(b"\n")) for row in rows]
        except OSError:
            return []


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
    """Return the loss and the metrics of a validation; of a row without them, the first others."""
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
    """Return a number with few digits, and everything else as a message has it."""
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else written(value)


def _clean(text: str) -> str:
    return " ".join(printable(text[:_MAX_LINE_LENGTH]).split("\n"))


def _print(console: Console, line: Text) -> None:
    if console.is_terminal:
        line.truncate(console.width, overflow="ellipsis")
    console.print(line, soft_wrap=True)


def _time_of(row: dict[str, Any]) -> float:
    return as_number(row.get("time")) or 0.0
