"""Where a record's rows go: the run's files (metrics.jsonl and others) or lists in memory, and any number of sinks.

A sink, for a tracker or a database, is an object with the methods of `Sink` that it needs.
"""

from __future__ import annotations

import threading
from bdb import BdbQuit
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any

from hookline._console import logger, warn
from hookline._fs import make_directory
from hookline._limits import MAX_YAML
from hookline.core.failures import raise_if_quit
from hookline.errors import RecordError, shown
from hookline.record import strict_json
from hookline.record.events import EVENTS
from hookline.record.format import CONFIG_FILE, RUN_FILE, MediaRow, check_run
from hookline.record.json_lines import JsonLines, read_json, write_json_atomic, write_text_atomic
from hookline.record.labels import Labels, write_labels
from hookline.record.layers import LayerLines, LayerRow
from hookline.record.lock import RunLock
from hookline.record.media import MediaLines
from hookline.record.provenance import environment, git_state

KINDS = ("metrics", "layers", "events", "media")  # A sink has a method ``write_<kind>`` for each kind it wants.
_WEIGHTS = {"layers": 100, "media": 1000}  # about how many rows of metrics take as much memory as one row


Sink = Any
"""An object that receives every row of a record, in batches, when the record is flushed.

It has one or more of these methods:

- ``write_metrics(rows)`` receives rows of metrics.jsonl: ``step``, ``epoch``, ``time`` and one number per metric.
- ``write_layers(rows)`` receives statistics per layer, as `LayerRow`, whose ``values`` it does not write to.
- ``write_events(rows)`` receives rows of events.jsonl: ``time``, ``kind``, ``step`` and the event's own fields.
- ``write_media(rows)`` receives tables and images, as `MediaRow`.

If it has ``close(run)``, that is called once, after the last rows, with the fields of run.json, the outcome among them.
All numbers are on the host, and secrets are redacted as they are in the files.
"""


@dataclass(frozen=True)
class SinkHandle:
    """The handle of an added sink: `remove` disconnects it, and so does the end of a ``with`` block."""

    remove: Callable[[], None]

    def __enter__(self) -> SinkHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


ReportFailure = Callable[[Sink, int | None, Exception], None]
"""Receives a sink that failed and was removed, the step of the last row meant for it, and its exception."""


class AddedSinks:
    """The sinks that were added to a record, and the rows that they have not received yet."""

    def __init__(self) -> None:
        self._sinks: list[Sink] = []
        self._queue: deque[tuple[str, Sequence[Any]]] = deque()  # kinds and rows; adding to it needs no lock
        self._delivering = threading.RLock()  # reentrant, because a sink may log and flush

    def add(self, sink: Sink) -> SinkHandle:
        """Add a sink unless it was added before. Raises `RecordError` if it has none of the methods."""
        methods = [f"write_{kind}" for kind in KINDS]
        if not any(callable(getattr(sink, method, None)) for method in methods):
            raise RecordError(f"{shown(sink)} is not a sink: it has none of the methods {', '.join(methods)}")
        if not any(added is sink for added in self._sinks):
            self._sinks.append(sink)
        return SinkHandle(lambda: self._remove(sink))

    def share(self, other: AddedSinks) -> None:
        """Use the same sinks as another record; removing one removes it from both."""
        self._sinks = other._sinks

    def put(self, kind: str, rows: Sequence[Any]) -> None:
        """Queue rows for the next delivery."""
        if self._sinks:
            self._queue.append((kind, rows))

    def deliver(self, report_failure: ReportFailure) -> None:
        """Pass the queued rows to every sink; one that raises is removed and reported.

        Reporting queues an event for the other sinks, which is delivered at once: this may be the end of the run.
        """
        interruptions: list[BaseException] = []
        with self._delivering:
            has_failed = True
            while has_failed and self._queue:
                count = len(self._sinks)
                queued = [self._queue.popleft() for _ in range(len(self._queue))]
                for kind in KINDS:
                    if rows := [row for of_kind, rows in queued if of_kind == kind for row in rows]:
                        interruptions += self._write(kind, rows, report_failure)
                has_failed = len(self._sinks) < count
        _end_run(interruptions)  # now that the other sinks have their rows

    def close(self, run: Mapping[str, Any], report_failure: ReportFailure) -> None:
        """Call `close` of every sink that has it; one that raises is removed and reported."""
        _end_run(self._call_each("close", lambda: run, None, report_failure))

    def _write(self, kind: str, rows: Sequence[Any], report_failure: ReportFailure) -> list[BaseException]:
        """Pass rows of a kind to every sink, and return what was raised to end the run."""
        last = rows[-1]
        step = last["step"] if isinstance(last, dict) else last.step

        def copies() -> list[Any]:  # each sink has its own dicts, so that it may change or keep them
            return [dict(row) if isinstance(row, dict) else row for row in rows]

        return self._call_each(f"write_{kind}", copies, step, report_failure)

    def _call_each(
        self, method: str, make_argument: Callable[[], Any], step: int | None, report_failure: ReportFailure
    ) -> list[BaseException]:
        """Call a method of every sink that has it, and return what was raised to end the run, such as Ctrl-C."""
        interruptions: list[BaseException] = []
        for sink in list(self._sinks):
            try:
                if (call := getattr(sink, method, None)) is not None:
                    call(make_argument())
            except BdbQuit as error:
                self._remove(sink)
                interruptions.append(error)
            except Exception as error:
                self._remove(sink)
                report_failure(sink, step, error)
            except BaseException as error:  # Ctrl-C and sys.exit()
                interruptions.append(error)
        return interruptions

    def _remove(self, sink: Sink) -> None:
        self._sinks[:] = [added for added in self._sinks if added is not sink]


def _end_run(interruptions: Sequence[BaseException]) -> None:
    """Raise the first of the exceptions that end a run, if there is one."""
    if interruptions:
        raise_if_quit(interruptions[0], "a sink")
        raise interruptions[0]


class Storage:
    """Where a record is kept. Before the first step a directory that cannot be written raises an error.

    From then on nothing here stops the run: lines and values that are lost are counted, and the first one causes a
    warning. A kind of storage overrides the methods for which it has something to do.
    """

    path: Any = None  # the run's directory, if it has one
    is_continued = False  # whether an earlier attempt has written there
    lost = 0  # lines and values that could not be stored

    def __init__(self) -> None:
        self._files: dict[str, Any] = {}

    def write(self, kind: str, rows: Sequence[Any]) -> None:
        """Append rows of a kind."""
        for row in rows:
            self._try(self._append, kind, row)

    def describe(self, run: dict[str, Any]) -> None:
        """Add to the run's description what only this storage knows."""

    def start(self, run: dict[str, Any], config: Any, labels: Labels) -> None:
        """Write the run's description, config and labels."""

    def resume_at(self, step: int) -> None:
        """Discard layers, tables and images of later steps."""

    def report_loss(self, error: Exception, count: int = 1) -> None:
        """Count lines or values that could not be stored, and warn of the first."""
        self.lost += count
        if self.lost == count:
            self._warn(error)

    def sync(self) -> None:
        """Wait until the disk has the metrics and events that were written."""
        for kind in ("events", "metrics"):
            if kind in self._files:
                self._try(self._files[kind].sync)

    def end(self, run: dict[str, Any]) -> None:
        """Store the run's end before waiting for sinks, because a signal may not wait for them."""

    def close(self, run: dict[str, Any]) -> None:
        """Store the run's end, even if `end` was interrupted, and close everything."""
        self.end(run)
        self.release()

    def release(self) -> None:
        """Close everything, and leave the directory as it is."""
        for lines in self._files.values():
            lines.close()

    def _append(self, kind: str, row: Any) -> None:
        raise NotImplementedError

    def _warn(self, error: Exception) -> None:
        """Warn of the first loss."""

    def _try(self, write: Callable[..., None], *arguments: Any) -> None:
        try:
            write(*arguments)
        except (RecordError, OSError) as error:
            self.report_loss(error)


class MemoryStorage(Storage):
    """A record in lists, for tests and for runs that leave nothing on disk; it does not call git, either.

    Args:
        keep: The minimum number of rows that each list keeps, so that a long run does not fill the memory.
    """

    def __init__(self, keep: int = 100_000) -> None:
        super().__init__()
        self.rows: dict[str, list[Any]] = {kind: [] for kind in KINDS}
        self._keep = keep

    def write(self, kind: str, rows: Sequence[Any]) -> None:
        """Append rows of a kind."""
        stored, keep = self.rows[kind], max(self._keep // _WEIGHTS.get(kind, 1), 1)
        stored.extend(rows)
        if len(stored) >= 2 * keep:  # trimmed rarely, because it moves the rest
            del stored[:-keep]

    def resume_at(self, step: int) -> None:
        """Discard layers, tables and images of later steps."""
        for kind in ("layers", "media"):
            self.rows[kind][:] = [row for row in self.rows[kind] if row.step <= step]


class FileStorage(Storage):
    """A run's directory: run.json, config.yaml and a file per kind of rows; layers and media get theirs with a row."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._lock = RunLock(path)  # first: a second writer must not open the files
        self.is_continued = (path / RUN_FILE).exists()
        self._files = {kind: JsonLines(path / f"{kind}.jsonl") for kind in ("events", "metrics")}

    def describe(self, run: dict[str, Any]) -> None:
        """Add commit, environment and earlier attempts to the run's description."""
        earlier: Mapping[str, Any] = {}
        if self.is_continued:
            try:
                earlier = read_json(self.path / RUN_FILE)
            except RecordError as error:
                warn(f"{error}; earlier attempts are not listed", stacklevel=4)
        check_run(self.path, earlier)
        run |= {field: earlier[field] for field in ("started", "begins_trained") if field in earlier}
        run["git"] = git_state(Path())
        run["environment"] = environment()
        run["lineage"] = earlier.get("lineage") if run["lineage"] is None else run["lineage"]
        run["attempts"] = [*earlier.get("attempts", []), *run["attempts"]]

    def start(self, run: dict[str, Any], config: Any, labels: Labels) -> None:
        """Write the run's description and its config.

        The labels of a run that continues are left alone: they may have been changed since it began.
        """
        if not self.is_continued:
            write_labels(self.path, labels)
        write_text_atomic(self.path / CONFIG_FILE, _as_yaml(config))
        write_json_atomic(self.path / RUN_FILE, run)

    def resume_at(self, step: int) -> None:
        """Discard layers, tables and images of later steps; a run without them gets no file of them."""
        for kind in ("layers", "media"):
            if (self.path / f"{kind}.jsonl").exists():
                self.write(kind, [{"resumed": step}])

    def end(self, run: dict[str, Any]) -> None:
        """Write run.json."""
        self._try(write_json_atomic, self.path / RUN_FILE, run)

    def release(self) -> None:
        """Close the files and release the lock, and leave the directory as it is."""
        super().release()
        self._lock.release()

    def _append(self, kind: str, row: dict[str, Any] | LayerRow | MediaRow) -> None:
        """Append a row; the files of layers and media are opened with their first one."""
        if kind not in self._files:
            self._files[kind] = {"layers": LayerLines, "media": MediaLines}[kind](self.path / f"{kind}.jsonl")
        lines = self._files[kind]
        (lines.write if isinstance(row, dict) else lines.write_row)(row)

    def _warn(self, error: Exception) -> None:
        warn(f"the record in {self.path} is losing data; training continues: {error}", stacklevel=5)


class RankStorage(Storage):
    """The record of a rank other than 0: ``ranks/<rank>/events.jsonl``, created when something happens to it alone.

    Rank 0 writes the run's files, after this rank's metrics and layers were added to its own.
    """

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__()
        self.path = path
        self.is_continued = (path / RUN_FILE).exists()  # rank 0 writes it later for a new run
        self._rank = rank

    def write(self, kind: str, rows: Sequence[Any]) -> None:
        """Append events that concern this rank alone."""
        if kind == "events":
            of_all = {event.kind for event in EVENTS.values() if event.same_on_all_ranks}  # rank 0 writes them
            super().write(kind, [row for row in rows if row["kind"] not in of_all])

    def close(self, run: dict[str, Any]) -> None:
        """Close the file, if there is one; after a failure, close the run's record if rank 0 no longer can."""
        self.release()
        if run["outcome"] == "failed":
            sleep(min(self._rank, 10) * 0.05)  # so that the lowest surviving rank comes first
            try:
                self._close_for_rank_0(run)
            except (RecordError, OSError):
                return  # rank 0 is alive and holds the lock, or its directory is on another machine

    def _append(self, kind: str, row: dict[str, Any]) -> None:
        if kind not in self._files:
            directory = self.path / "ranks" / str(self._rank)
            make_directory(directory)
            self._files[kind] = JsonLines(directory / f"{kind}.jsonl")
        self._files[kind].write({**row, "rank": self._rank})

    def _warn(self, error: Exception) -> None:
        logger.warning("its record is losing data; training continues: %s", error, of_rank=True)

    def _close_for_rank_0(self, run: dict[str, Any]) -> None:
        """Write the outcome into run.json if rank 0 has not done that and does not hold the lock."""
        if read_json(self.path / RUN_FILE).get("outcome") is not None:
            return
        lock = RunLock(self.path)
        try:
            described = read_json(self.path / RUN_FILE)
            if described.get("outcome") is None:
                end = {name: run[name] for name in ("outcome", "reason", "closed")}
                described.update(end, **{name: run[name] for name in ("hooks", "costs", "counters", "lost")})
                described["attempts"][-1].update(end)
                write_json_atomic(self.path / RUN_FILE, described)
        finally:
            lock.release()


def _as_yaml(config: Any) -> str:
    """Return readable YAML; for values that it cannot express, and beyond `MAX_YAML`, JSON, which is also YAML."""
    import yaml  # late: a record in memory writes no config

    try:
        text = str(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
        if len(text.encode("utf-8")) <= MAX_YAML:
            return text
    except Exception:
        pass
    return strict_json.dumps(config, indent=2) + "\n"
