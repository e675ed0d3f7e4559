"""Sinks, which receive a record's rows: the run's files (metrics.jsonl and others), lists in memory, or a tracker.

A sink for a tracker or a database is an object with three methods; see `Sink`.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from hookline.errors import RecordError, shown
from hookline.record import strict_json
from hookline.record.json_lines import JsonLines, write_json_atomic, write_text_atomic
from hookline.record.layers import LayerLines, LayerRow
from hookline.record.lock import RunLock
from hookline.record.provenance import environment, git_state
from hookline.record.reader import read_json

_METHODS = ("write_metrics", "write_layers", "write_events")
_LAYER_ROW_WEIGHT = 100  # a row of layers takes about as much memory as 100 rows of metrics


class Sink(Protocol):
    """An object that receives every row of a record, in batches, when the record is flushed.

    All numbers are on the host, and secrets are redacted as they are in the files.
    """

    def write_metrics(self, rows: Sequence[dict[str, Any]], /) -> None:
        """Receive rows of metrics.jsonl: ``step``, ``epoch``, ``time`` and one number per metric."""

    def write_layers(self, rows: Sequence[LayerRow], /) -> None:
        """Receive statistics per layer; do not write to their ``values``."""

    def write_events(self, rows: Sequence[dict[str, Any]], /) -> None:
        """Receive rows of events.jsonl: ``time``, ``kind``, ``step`` and the event's own fields."""


class SinkHandle:
    """What adding a sink returns: `remove` disconnects it, and so does the end of a ``with`` block."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self.remove = remove

    def __enter__(self) -> SinkHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


class AddedSinks:
    """The sinks that were added to a record, and the rows that they have not received yet."""

    def __init__(self) -> None:
        self._sinks: list[Sink] = []
        self._rows: dict[str, list[Any]] = {method: [] for method in _METHODS}
        self._queueing = threading.Lock()  # held for moments only: no thread waits for a slow sink to queue a row
        self._delivering = threading.RLock()

    def add(self, sink: Sink) -> SinkHandle:
        """Add a sink unless it is there. Raises `RecordError` if it lacks one of the three methods."""
        missing = [name for name in _METHODS if not callable(getattr(sink, name, None))]
        if missing:
            raise RecordError(f"{shown(sink)} is not a sink: it has no method {', '.join(missing)}")
        if not any(one is sink for one in self._sinks):
            self._sinks.append(sink)
        return SinkHandle(lambda: self._remove(sink))

    def share(self, other: AddedSinks) -> None:
        """Use the same sinks as another record; removing one removes it from both."""
        self._sinks = other._sinks

    def put(self, method: str, rows: Sequence[Any]) -> None:
        """Queue rows for the next delivery."""
        if self._sinks:
            with self._queueing:
                self._rows[method].extend(rows)

    def deliver(self, report_failure: Callable[[Sink, int | None, Exception], None]) -> None:
        """Call every sink with the queued rows; one that raises is removed and reported.

        Reporting queues an event for the other sinks, which is delivered at once: this may be the end of the run.
        """
        with self._delivering:
            failed = True
            while failed and any(self._rows.values()):
                with self._queueing:
                    rows, self._rows = self._rows, {method: [] for method in _METHODS}
                failures = [self._deliver_to(sink, rows, report_failure) for sink in list(self._sinks)]
                failed = any(failures)

    def _deliver_to(
        self, sink: Sink, rows: dict[str, list[Any]], report_failure: Callable[[Sink, int | None, Exception], None]
    ) -> bool:
        """Call one sink and return whether it raised."""
        for method, batch in rows.items():
            if not batch:
                continue
            try:
                # Each sink has its own dicts, so that it may change or keep them.
                getattr(sink, method)([dict(row) if isinstance(row, dict) else row for row in batch])
            except Exception as error:
                self._remove(sink)
                last = batch[-1]
                report_failure(sink, last["step"] if isinstance(last, dict) else last.step, error)
                return True
        return False

    def _remove(self, sink: Sink) -> None:
        self._sinks[:] = [one for one in self._sinks if one is not sink]


class MemorySink:
    """Lists of rows, for tests and for runs that leave nothing on disk.

    Args:
        keep: How many rows each list keeps at least, so that a long run does not fill the memory.
    """

    path: Path | None = None

    def __init__(self, keep: int = 100_000) -> None:
        self.metrics: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.layer_rows: list[LayerRow] = []
        self.lost = 0
        self._keep = keep

    def write_metrics(self, rows: Sequence[dict[str, Any]], /) -> None:
        """Append rows of metrics."""
        self._append(self.metrics, rows, self._keep)

    def write_layers(self, rows: Sequence[LayerRow], /) -> None:
        """Append rows of layers."""
        self._append(self.layer_rows, rows, self._keep // _LAYER_ROW_WEIGHT)

    def write_events(self, rows: Sequence[dict[str, Any]], /) -> None:
        """Append events."""
        self._append(self.events, rows, self._keep)

    def start(self, run: dict[str, Any], config: Any) -> None:
        """Do nothing: git and the environment stay unknown, because asking would touch the disk."""

    def resume_at(self, step: int) -> None:
        """Discard layers of later steps."""
        self.layer_rows[:] = [row for row in self.layer_rows if row.step <= step]

    def report_loss(self, error: Exception, count: int = 1) -> None:
        """Count values that could not be stored."""
        self.lost += count

    def sync(self) -> None:
        """Do nothing."""

    def close(self, run: dict[str, Any]) -> None:
        """Do nothing."""

    def _append(self, stored: list[Any], rows: Sequence[Any], keep: int) -> None:
        stored.extend(rows)
        if len(stored) >= 2 * max(keep, 1):  # trimmed rarely, because it moves the rest
            del stored[: -max(keep, 1)]


class FileSink:
    """A run's directory: run.json, config.yaml, metrics.jsonl, events.jsonl and, once there are any, layers.jsonl.

    Before the first step a directory that cannot be written is an error. From then on nothing here stops the run: a
    line that the disk refuses is counted in `lost`, and the first one causes a warning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        self._warned = False
        self._lock = RunLock(path)  # first: a second writer must not open the files
        self._events = JsonLines(path / "events.jsonl")
        self._metrics = JsonLines(path / "metrics.jsonl")
        self._layers = LayerLines(path / "layers.jsonl")

    def write_metrics(self, rows: Sequence[dict[str, Any]], /) -> None:
        """Append lines to metrics.jsonl."""
        for row in rows:
            self._try(self._metrics.write, row)

    def write_layers(self, rows: Sequence[LayerRow], /) -> None:
        """Append lines to layers.jsonl."""
        for row in rows:
            self._try(self._layers.write, row)

    def write_events(self, rows: Sequence[dict[str, Any]], /) -> None:
        """Append lines to events.jsonl."""
        for row in rows:
            self._try(self._events.write, row)

    def start(self, run: dict[str, Any], config: Any) -> None:
        """Add commit, environment and earlier attempts to the run's description, and write it with the config."""
        earlier: Mapping[str, Any] = {}
        if (self.path / "run.json").exists():
            try:
                earlier = read_json(self.path / "run.json")
            except RecordError as error:
                warnings.warn(f"{error}; earlier attempts are not listed", RuntimeWarning, stacklevel=3)
        if not isinstance(earlier.get("attempts", []), list):
            earlier = {}
        run["started"] = earlier.get("started", run["started"])
        run["git"] = git_state(Path.cwd())
        run["environment"] = environment()
        run["lineage"] = earlier.get("lineage") if run["lineage"] is None else run["lineage"]
        run["attempts"] = [*earlier.get("attempts", []), *run["attempts"]]
        try:
            write_text_atomic(self.path / "config.yaml", _as_yaml(config))
            write_json_atomic(self.path / "run.json", run)
        except RecordError:  # the run does not begin, so another attempt in this process must get the lock
            self._lock.release()
            raise

    def resume_at(self, step: int) -> None:
        """Discard layers of later steps."""
        self._try(self._layers.resume_at, step)

    def report_loss(self, error: Exception, count: int = 1) -> None:
        """Count lines or values that could not be written, and warn of the first."""
        self.lost += count
        if not self._warned:
            self._warned = True
            message = f"the record in {self.path} is losing data, training continues: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=4)

    def sync(self) -> None:
        """Wait until the disk has what was written."""
        for lines in (self._metrics, self._events):
            self._try(lines.sync)

    def close(self, run: dict[str, Any]) -> None:
        """Write run.json, close the files and release the lock."""
        self._try(write_json_atomic, self.path / "run.json", run)
        for lines in (self._metrics, self._events, self._layers):
            lines.close()
        self._lock.release()

    def _try(self, write: Callable[..., None], *arguments: Any) -> None:
        try:
            write(*arguments)
        except RecordError as error:
            self.report_loss(error)


def _as_yaml(config: Any) -> str:
    """Return readable YAML; without PyYAML, or for what it cannot express, JSON, which YAML readers read, too."""
    try:
        import yaml

        return str(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    except Exception:
        return strict_json.dumps(config, indent=2) + "\n"
