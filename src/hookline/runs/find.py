"""Find runs, and read what their small files say: run.json, labels.json, .lock and the last lines of the others."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from hookline.errors import RecordError
from hookline.record.format import EVENTS_FILE, LAYERS_FILE, METRICS_FILE
from hookline.record.json_lines import as_number
from hookline.runs.reader import MAX_TAIL_BYTES, TAIL_BYTES, RunReader, has_step

RUNNING, KILLED = "running", "killed"  # instead of an outcome
_TIME = re.compile(rb'"time": ?(\d+(?:\.\d+)?)[,}]')
_STOPPED_BY = re.compile(r"stopped by (\S+?)(?: on rank \d+)?: ")


@dataclass(frozen=True)
class Score:
    """A value that says how good a run is."""

    metric: str
    value: float
    is_best: bool  # by a checkpoint hook's `monitor`; otherwise the last value that was written


class RunFiles(RunReader):
    """The small files of a run, and the last 64 kB to 4 MB of the others, however long the run was."""

    @classmethod
    def read(cls, directory: Path | str) -> RunFiles:
        """Read the run.json of a directory. Raises `RecordError` if it is not a run, or has a newer format."""
        files = cls(directory)
        files.run  # noqa: B018 - read now
        return files

    @property
    def run_id(self) -> str:
        """The id, which is the name of the directory unless it was renamed."""
        return str(self.run["run_id"])

    @cached_property
    def outcome(self) -> str:
        """How the run ended; "running" or "killed" if run.json does not say."""
        outcome: str | None = self.run.get("outcome")
        return outcome or (RUNNING if self.has_owner else KILLED)

    @property
    def ending(self) -> str:
        """The outcome and, for a run that was stopped, which hook stopped it."""
        stopped = _STOPPED_BY.match(self.run.get("reason") or "")
        return f"stopped by {stopped[1]}" if self.outcome == "stopped" and stopped else self.outcome

    @property
    def is_short(self) -> bool:
        """Whether what was recorded is so little that a list of runs may read it whole."""
        sizes = [self.path / name for name in (METRICS_FILE, LAYERS_FILE, EVENTS_FILE)]
        return sum(file.stat().st_size for file in sizes if file.is_file()) <= MAX_TAIL_BYTES

    @cached_property
    def started(self) -> datetime | None:
        """When the first attempt began, in local time."""
        return read_time(self.run.get("started"))

    @cached_property
    def score(self) -> Score | None:
        """The best value that a checkpoint hook monitors, or the last val/loss or train/loss."""
        for row in self.last_rows(EVENTS_FILE, containing=b'"best_checkpoint"'):
            value = as_number(row.get("value")) if row.get("kind") == "best_checkpoint" else None
            if value is not None:
                return Score(str(row.get("monitor")), value, True)
        for name in ("val/loss", "train/loss"):
            for row in self._last_metrics:
                if (value := as_number(row.get(name))) is not None:
                    return Score(name, value, False)
        return None

    @property
    def step(self) -> int | None:
        """The number of steps; for a run that has not ended, the last step that was written."""
        counted: int | None = self.run.get("counters", {}).get("step") if self.run.get("outcome") else None
        return counted if counted is not None else next((row["step"] for row in self._last_metrics), None)

    @property
    def seconds(self) -> float | None:
        """The time of all attempts, without the pauses between them; every command and the report show this one.

        It includes the time that a killed attempt spent on steps which the next one repeated. An attempt that was
        killed ends with its last row of metrics. If a later attempt has written more than 4 MB since, the row is not
        looked for, and the start of the next attempt counts instead.
        """
        known = [seconds for seconds in self._attempt_seconds if seconds is not None]
        return sum(known) if known else None

    @property
    def last_attempt_seconds(self) -> float | None:
        """The time of the last attempt, which the costs of hooks are about; None if it is not known."""
        return next(reversed(self._attempt_seconds), None)

    @property
    def _attempt_seconds(self) -> list[float | None]:
        """The time of each attempt; None if it is not known."""
        attempts = self.run.get("attempts", [])
        times: list[float | None] = []
        for attempt, following in zip(attempts, [*attempts[1:], None], strict=False):
            if (measured := as_number(attempt.get("seconds"))) is not None:
                times.append(max(measured, 0.0))
                continue
            begin, end = read_time(attempt.get("started")), read_time(attempt.get("closed"))
            if end is None and following is None and self.outcome == RUNNING:
                end = datetime.now().astimezone()
            elif end is None:
                end = self._killed_at(begin, read_time(following.get("started")) if following else self._last_written)
            times.append(None if begin is None or end is None else max((end - begin).total_seconds(), 0.0))
        return times

    def _killed_at(self, begin: datetime | None, following: datetime | None) -> datetime | None:
        """Return when an attempt that was killed wrote its last metrics, before a time; None if it wrote none."""
        if begin is None or following is None:
            return None
        row_times = [time for time in self._row_times if time < following.timestamp()]
        if row_times and row_times[-1] >= begin.timestamp():
            return datetime.fromtimestamp(row_times[-1]).astimezone()
        # Rows from before the attempt say that it wrote none; without them, its own may be too far back.
        is_all_read = row_times or self._metrics_stat is None or self._metrics_stat.st_size <= MAX_TAIL_BYTES
        return None if is_all_read else following

    @cached_property
    def _row_times(self) -> list[float]:
        """The times of the last rows of metrics in their order, as far back as they are read."""
        # Parsing every line of megabytes would take seconds for a list of runs.
        matches = (_TIME.search(line) for line in self.last_lines(METRICS_FILE))
        return sorted(float(match[1]) for match in matches if match)

    @cached_property
    def _metrics_stat(self) -> os.stat_result | None:
        with suppress(OSError):
            return (self.path / METRICS_FILE).stat()
        return None

    @property
    def _last_written(self) -> datetime | None:
        stat = self._metrics_stat
        return None if stat is None else datetime.fromtimestamp(stat.st_mtime).astimezone()

    @cached_property
    def _last_metrics(self) -> list[dict[str, Any]]:
        """The rows in the last 64 kB of metrics that count, the newest first, or the last one if it is longer."""
        if not all("closed" in attempt for attempt in self.run.get("attempts", [])):
            self.read_end(METRICS_FILE)  # the time of the kill is farther back
        return [row for row in self.last_rows(METRICS_FILE, most=TAIL_BYTES) if has_step(row)]


def list_runs(directory: Path | str) -> tuple[list[RunFiles], list[Path]]:
    """Read the runs of a directory; also return the directories in it that are not runs, or cannot be read.

    Raises:
        RecordError: If there is no such directory, or it cannot be read.
    """
    try:
        with os.scandir(directory) as entries:
            # `Path.is_dir` is false for a link that leads nowhere or to itself; the entry's own `is_dir` raises.
            paths = sorted(
                Path(entry.path) for entry in entries if Path(entry).is_dir() and not entry.name.startswith(".")
            )
    except (OSError, ValueError) as error:
        raise RecordError(f"cannot read {directory}: {getattr(error, 'strerror', None) or error}") from error
    runs, others = [], []
    for path in paths:
        try:
            runs.append(RunFiles.read(path))
        except RecordError:
            others.append(path)
    return runs, others


def run_labels(files: Sequence[RunFiles]) -> list[str]:
    """Return a label for each run, different for all: its name or, without one, its id; both or the path, if needed."""
    names = [run.labels.name or run.path.name for run in files]
    labels = names
    for asides in ([run.path.name for run in files], [str(run.path) for run in files]):
        counts = Counter(labels)
        labels = [
            label if counts[label] == 1 else f"{name} ({aside})"
            for label, name, aside in zip(labels, names, asides, strict=True)
        ]
    return labels


def read_time(text: Any) -> datetime | None:
    """Return a time of run.json in local time; None if it is not one."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except (TypeError, ValueError, OverflowError, OSError):
        return None
