"""Where a record's rows go: the run's files (metrics.jsonl and others) or lists in memory, and any number of sinks.

A sink, for a tracker or a database, is an object with three or four methods; see `Sink`.
"""

from __future__ import annotations

import threading
from bdb import BdbQuit
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import sleep
from typing import Any, Protocol

from hookline._console import logger, warn
from hookline._fs import make_directory
from hookline.core.failures import raise_if_quit
from hookline.errors import RecordError, shown
from hookline.record import strict_json
from hookline.record.events import EVENTS
from hookline.record.format import MediaRow, check_run
from hookline.record.json_lines import JsonLines, read_json, write_json_atomic, write_text_atomic
from hookline.record.labels import Labels, write_labels
from hookline.record.layers import LayerLines, LayerRow
from hookline.record.lock import RunLock
from hookline.record.media import MediaLines
from hookline.record.provenance import environment, git_state

REQUIRED_KINDS = ("metrics", "layers", "events")  # of rows; a sink has a method ``write_<kind>`` for each
KINDS = (*REQUIRED_KINDS, "media")
_WEIGHTS = {"layers": 100, "media": 1000}  # about how many rows of metrics take as much memory as one row


class Sink(Protocol):
    """An object that receives every row of a record, in batches, when the record is flushed.

    All numbers are on the host, and secrets are redacted as they are in the files. A sink may have two more methods:
    ``write_media(rows)`` receives tables and images, as `MediaRow`. ``close(run)`` is called once, after the last rows,
    with the fields of run.json, the outcome among them.
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

    def __exit__(self, *error: object) -> None:
        self.remove()


class AddedSinks:
    """The sinks that were added to a record, and the rows that they have not received yet."""

    def __init__(self) -> None:
        self._sinks: list[Sink] = []
        self._rows: dict[str, list[Any]] = {kind: [] for kind in KINDS}
        self._queueing = threading.Lock()  # held for moments only: no thread waits for a slow sink to queue a row
        self._delivering = threading.RLock()

    def add(self, sink: Sink) -> SinkHandle:
        """Add a sink unless it is there. Raises `RecordError` if it lacks a required method."""
        missing = [f"write_{kind}" for kind in REQUIRED_KINDS if not callable(getattr(sink, f"write_{kind}", None))]
        if missing:
            raise RecordError(f"{shown(sink)} is not a sink: it has no method {', '.join(missing)}")
        if not any(added is sink for added in self._sinks):
            self._sinks.append(sink)
        return SinkHandle(lambda: self._remove(sink))

    def share(self, other: AddedSinks) -> None:
        """Use the same sinks as another record; removing one removes it from both."""
        self._sinks = other._sinks

    def put(self, kind: str, rows: Sequence[Any]) -> None:
        """Queue rows for the next delivery."""
        if self._sinks:
            with self._queueing:
                self._rows[kind].extend(rows)

    def deliver(self, report_failure: Callable[[Sink, int | None, Exception], None]) -> None:
        """Call every sink with the queued rows; one that raises is removed and reported.

        Reporting queues an event for the other sinks, which is delivered at once: this may be the end of the run.
        """
        # Delivering is reentrant, because a sink may log and flush; rows are taken out of the queue before sinks are
        # called, so that the lock of the queue is not held meanwhile.
        with self._delivering:
            failed = True
            interruption: BaseException | None = None
            while failed and any(self._rows.values()):
                failed = False
                with self._queueing:
                    rows, self._rows = self._rows, {kind: [] for kind in KINDS}
                batches = [(kind, batch) for kind, batch in rows.items() if batch]
                for sink in list(self._sinks):
                    try:
                        for kind, batch in batches:
                            if (write := getattr(sink, f"write_{kind}", None)) is None:
                                continue
                            # Each sink has its own dicts, so that it may change or keep them.
                            own = [dict(row) if isinstance(row, dict) else row for row in batch]
                            write(own)
                    except BdbQuit as error:
                        self._remove(sink)
                        interruption = interruption or error
                    except Exception as error:
                        failed = True
                        self._remove(sink)
                        last = batch[-1]  # of the kind that the sink failed at
                        report_failure(sink, last["step"] if isinstance(last, dict) else last.step, error)
                    except BaseException as error:  # Ctrl-C and sys.exit()
                        interruption = interruption or error
            if interruption is not None:  # it ends the run, now that the other sinks have their rows
                raise_if_quit(interruption, "a sink")
                raise interruption

    def close(self, run: Mapping[str, Any], report_failure: Callable[[Sink, int | None, Exception], None]) -> None:
        """Call `close` of every sink that has it; one that raises is reported."""
        interruption: BaseException | None = None
        for sink in list(self._sinks):
            try:
                if callable(close := getattr(sink, "close", None)):
                    close(run)
            except BdbQuit as error:
                interruption = interruption or error
            except Exception as error:
                report_failure(sink, None, error)
            except BaseException as error:  # Ctrl-C while a sink sends its last rows
                interruption = interruption or error
        if interruption is not None:  # it ends the run, now that the other sinks are closed
            raise_if_quit(interruption, "a sink")
            raise interruption

    def _remove(self, sink: Sink) -> None:
        self._sinks[:] = [added for added in self._sinks if added is not sink]


class MemoryStorage:
    """A record in lists, for tests and for runs that leave nothing on disk.

    Args:
        keep: How many rows each list keeps at least, so that a long run does not fill the memory.
    """

    path: Path | None = None
    is_continued = False

    def __init__(self, keep: int = 100_000) -> None:
        self.rows: dict[str, list[Any]] = {kind: [] for kind in KINDS}
        self.lost = 0
        self._keep = keep

    def write(self, kind: str, rows: Sequence[Any]) -> None:
        """Append rows of a kind."""
        stored, keep = self.rows[kind], max(self._keep // _WEIGHTS.get(kind, 1), 1)
        stored.extend(rows)
        if len(stored) >= 2 * keep:  # trimmed rarely, because it moves the rest
            del stored[:-keep]

    def describe(self, run: dict[str, Any]) -> None:
        """Do nothing: git and the environment stay unknown, because asking would touch the disk."""

    def start(self, run: dict[str, Any], config: Any, labels: Labels) -> None:
        """Do nothing."""

    def resume_at(self, step: int) -> None:
        """Discard layers, tables and images of later steps."""
        for kind in ("layers", "media"):
            self.rows[kind][:] = [row for row in self.rows[kind] if row.step <= step]

    def report_loss(self, error: Exception, count: int = 1) -> None:
        """Count values that could not be stored."""
        self.lost += count

    def sync(self) -> None:
        """Do nothing."""

    def close(self, run: dict[str, Any]) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""


class FileStorage:
    """A run's directory: run.json, config.yaml, metrics.jsonl, events.jsonl, and layers.jsonl or media.jsonl with rows.

    Before the first step a directory that cannot be written is an error. From then on nothing here stops the run: a
    line that the disk refuses is counted in `lost`, and the first one causes a warning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        self._lock = RunLock(path)  # first: a second writer must not open the files
        self.is_continued = (path / "run.json").exists()
        self._files: dict[str, Any] = {kind: JsonLines(path / f"{kind}.jsonl") for kind in ("events", "metrics")}

    def write(self, kind: str, rows: Sequence[Any]) -> None:
        """Append rows of a kind to its file."""
        for row in rows:
            self._try(self._append, kind, row)

    def describe(self, run: dict[str, Any]) -> None:
        """Add commit, environment and earlier attempts to the run's description."""
        earlier: Mapping[str, Any] = {}
        if self.is_continued:
            try:
                earlier = read_json(self.path / "run.json")
            except RecordError as error:
                warn(f"{error}; earlier attempts are not listed", stacklevel=4)
        check_run(self.path, earlier)
        run["started"] = earlier.get("started", run["started"])
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
        write_text_atomic(self.path / "config.yaml", _as_yaml(config))
        write_json_atomic(self.path / "run.json", run)

    def resume_at(self, step: int) -> None:
        """Discard layers, tables and images of later steps; a run without them gets no file of them."""
        for kind in ("layers", "media"):
            if (self.path / f"{kind}.jsonl").exists():
                self._try(self._append, kind, {"resumed": step})

    def report_loss(self, error: Exception, count: int = 1) -> None:
        """Count lines or values that could not be written, and warn of the first."""
        is_first = not self.lost
        self.lost += count
        if is_first:
            message = f"the record in {self.path} is losing data, training continues: {error}"
            warn(message, stacklevel=4)

    def sync(self) -> None:
        """Wait until the disk has the metrics and events that were written."""
        for kind in ("events", "metrics"):
            self._try(self._files[kind].sync)

    def close(self, run: dict[str, Any]) -> None:
        """Write run.json, close the files and release the lock."""
        self._try(write_json_atomic, self.path / "run.json", run)
        self.release()

    def release(self) -> None:
        """Close the files and release the lock, and leave the directory as it is."""
        for lines in self._files.values():
            lines.close()
        self._lock.release()

    def _append(self, kind: str, row: dict[str, Any] | LayerRow | MediaRow) -> None:
        """Append a row; the files of layers and media are opened with their first one."""
        if kind not in self._files:
            self._files[kind] = {"layers": LayerLines, "media": MediaLines}[kind](self.path / f"{kind}.jsonl")
        lines = self._files[kind]
        (lines.write if isinstance(row, dict) else lines.write_row)(row)

    def _try(self, write: Callable[..., None], *arguments: Any) -> None:
        try:
            write(*arguments)
        except RecordError as error:
            self.report_loss(error)


class RankStorage:
    """The record of a rank other than 0: ``ranks/<rank>/events.jsonl``, made when something happens to that rank alone.

    Its metrics and layers are added to those of the other ranks before rank 0 writes them.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self.is_continued = (path / "run.json").exists()  # rank 0 writes that of a new run later
        self.lost = 0
        self._rank = rank
        self._events: JsonLines | None = None

    def write(self, kind: str, rows: Sequence[Any]) -> None:
        """Append events that concern this rank alone."""
        for row in rows if kind == "events" else ():
            known = EVENTS.get(row["kind"])
            if known is not None and known.same_on_all_ranks:
                continue  # rank 0 writes it
            try:
                if self._events is None:
                    directory = self.path / "ranks" / str(self._rank)
                    make_directory(directory)
                    self._events = JsonLines(directory / "events.jsonl")
                self._events.write({**row, "rank": self._rank})
            except (RecordError, OSError) as error:
                self.report_loss(error)

    def describe(self, run: dict[str, Any]) -> None:
        """Do nothing: rank 0 describes the run."""

    def start(self, run: dict[str, Any], config: Any, labels: Labels) -> None:
        """Do nothing: rank 0 writes the files."""

    def resume_at(self, step: int) -> None:
        """Do nothing: layers, tables and images are rank 0's."""

    def report_loss(self, error: Exception, count: int = 1) -> None:
        """Count lines that could not be written, and warn of the first."""
        self.lost += count
        if self.lost == count:
            logger.warning("its record is losing data, training continues: %s", error, of_rank=True)

    def sync(self) -> None:
        """Wait until the disk has the events that were written."""
        try:
            if self._events is not None:
                self._events.sync()
        except RecordError as error:
            self.report_loss(error)

    def close(self, run: dict[str, Any]) -> None:
        """Close the file, if there is one; after a failure, close the run's record if rank 0 no longer can."""
        self.release()
        if run["outcome"] == "failed":
            sleep(min(self._rank, 10) * 0.05)  # so that the lowest rank that lives comes first
            try:
                self._close_for_rank_0(run)
            except (RecordError, OSError):
                return  # rank 0 is alive and holds the lock, or its directory is on another machine

    def release(self) -> None:
        """Close the file, if there is one."""
        if self._events is not None:
            self._events.close()

    def _close_for_rank_0(self, run: dict[str, Any]) -> None:
        """Write the outcome into run.json if rank 0 has neither done that nor holds the lock."""
        if read_json(self.path / "run.json").get("outcome") is not None:
            return
        lock = RunLock(self.path)
        try:
            described = read_json(self.path / "run.json")
            if described.get("outcome") is None:
                end = {name: run[name] for name in ("outcome", "reason", "closed")}
                described.update(end, **{name: run[name] for name in ("hooks", "costs", "counters", "lost")})
                described["attempts"][-1].update(end)
                write_json_atomic(self.path / "run.json", described)
        finally:
            lock.release()


def _as_yaml(config: Any) -> str:
    """Return readable YAML; without PyYAML, or for what it cannot express, JSON, which YAML readers read, too."""
    try:
        import yaml

        return str(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    except Exception:
        return strict_json.dumps(config, indent=2) + "\n"
