"""The record of a run: every metric, statistic per layer, event, table and image, passed to sinks.

The first sink stores the record, in the run's files or in memory. Any number of others may be added.
"""

from __future__ import annotations

import os
import platform
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hookline._console import logger
from hookline._fs import explain, refuse_link
from hookline._words import nearest
from hookline.core.shared_part import SharedPart
from hookline.errors import RecordError, cut, error_text
from hookline.record import strict_json
from hookline.record.format import FORMAT, NOT_METRICS, MediaRow, SeriesHeader, utc_now
from hookline.record.labels import Labels, read_labels, redact_labels
from hookline.record.layers import LayerRow, layer_step
from hookline.record.media import make_image, make_table, media_name, pending_media
from hookline.record.metrics import Entry, MetricBatch, snapshot
from hookline.record.outcome import Outcome
from hookline.record.pending import Pending
from hookline.record.provenance import UNKNOWN_GIT_STATE, config_hash, new_run_id
from hookline.record.redaction import SecretValues, find_secrets, redact, redact_name, redact_text
from hookline.record.sinks import AddedSinks, FileStorage, MemoryStorage, RankStorage, Sink, SinkHandle, Storage

# What Hookline writes into a run's directory: files, then directories.
CONTENTS = (
    "run.json", "labels.json", "config.yaml", "metrics.jsonl", "layers.jsonl", "events.jsonl", "log.jsonl", ".lock",
    "media.jsonl", "media", "report.html",
    "checkpoints", "abandoned", "exception", "crashes", "captures", "traces", "ranks", "tensorboard",
)  # fmt: skip

_SAFE_NAME = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*")


class Record:
    """A run's record: what it did, with which code and config. Created by `on_disk` or `in_memory`.

    Values are logged without waiting for a device. `flush` writes those that are on the host and passes them to the
    added sinks; `close` does so for everything. No failure of a disk, a device or a sink ends training. Safe to use
    from several threads.

    Args:
        storage: Where the record is kept.
        config: The run's resolved config; secrets are removed.
        seed: The run's seed.
        run_id: The run's id.
    """

    def __init__(self, storage: Storage, config: Mapping[str, Any] | None, seed: int | None, run_id: str) -> None:
        self.run_id = run_id
        self.path = storage.path  # the run's directory; None in memory
        self.run: dict[str, Any] = {}  # the fields of run.json, empty before `start`
        self._storage = storage
        # The pending writes of a continuing run until its first step: a run that fails before it leaves its directory
        # alone.
        self._held: list[Callable[[], Any]] | None = [] if storage.is_continued else None
        self._holding = threading.RLock()  # a change that was deferred may record an event
        self._sinks = AddedSinks()
        self._secrets = SecretValues()
        self._secrets.add(find_secrets([config, os.environ]))
        self._config = redact(config or {})
        self._seed = seed
        self._labels = Labels()  # The labels of a new run; people may change them during the run.
        self._is_first = True  # whether this is rank 0's record, which alone has layers, tables and images
        self._closed, self._files_closed, self._started = False, False, time.monotonic()
        self._entries: list[Entry] = []  # metrics that no flush has taken yet
        self._headers: dict[str, SeriesHeader] = {}  # the newest of each series
        self._pending: deque[Pending] = deque()  # on their way to the host, in order
        self._pending_metrics = self._pending  # Rows of several ranks have their own queue.
        self._copying, self._reading = threading.RLock(), threading.RLock()

    @classmethod
    def on_disk(
        cls, root: Path | str, *, config: Mapping[str, Any], seed: int | None, run_id: str | None = None
    ) -> Record:
        """Make a record in the directory ``root/<run_id>``.

        Args:
            root: The directory of all runs.
            config: The run's resolved config.
            seed: The run's seed.
            run_id: The id of a run that continues, whose files are appended to; a new id if None.

        Raises:
            RecordError: If the id is not a plain name, or the directory cannot be written or has another writer.
        """
        if run_id is not None and not _SAFE_NAME.fullmatch(run_id):
            raise RecordError(f"{run_id!r} cannot be a run_id; use letters, digits, . _ = - and no leading .")
        path = Path(root) / (run_id or new_run_id())
        try:
            path = path.absolute()  # fails where the current directory was removed
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(exist_ok=run_id is not None)  # a new run's must not exist: two runs never share one by accident
        except OSError as error:
            reason = f"{error.filename or root}: {error.strerror or error}"
            remedy = "choose a directory that you can write to"
            raise RecordError(f"cannot make the run's directory in {root} ({reason}); {remedy}") from error
        refuse_links(path)
        return cls(FileStorage(path), config, seed, path.name)

    @classmethod
    def in_memory(
        cls, config: Mapping[str, Any] | None = None, seed: int | None = None, *, keep: int = 100_000
    ) -> Record:
        """Create a record that never touches the disk, in the lists `metrics`, `layer_rows`, `events` and `media`.

        Args:
            config: The run's resolved config.
            seed: The run's seed.
            keep: The minimum number of rows that each list keeps.
        """
        return cls(MemoryStorage(keep), config, seed, new_run_id())

    @classmethod
    def of_rank(
        cls, rank: int, run_id: str, path: str | None, *, config: Mapping[str, Any], seed: int | None
    ) -> Record:
        """Make the record of a rank other than 0: it writes only what happened to that rank alone.

        Args:
            rank: The rank.
            run_id: The run's id.
            path: The run's directory; None for a record in memory.
            config: The run's resolved config.
            seed: The run's seed.
        """
        return cls(MemoryStorage() if path is None else RankStorage(Path(path), rank), config, seed, run_id)

    # ---- what the record is ------------------------------------------------------------------------------------------

    @property
    def lost(self) -> int:
        """How many lines and values could not be written."""
        return self._storage.lost

    @property
    def labels(self) -> Labels:
        """The run's name, tags and notes as they are now; empty before `start`, and if labels.json is damaged."""
        try:
            return self._labels if self.path is None else read_labels(self.path)
        except RecordError:
            return Labels()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics of a record in memory."""
        return self._rows("metrics")

    @property
    def layer_rows(self) -> list[LayerRow]:
        """The rows of layers of a record in memory."""
        return self._rows("layers")

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events of a record in memory."""
        return self._rows("events")

    @property
    def media(self) -> list[MediaRow]:
        """The tables and images of a record in memory."""
        return self._rows("media")

    def _rows(self, kind: str) -> list[Any]:
        if not isinstance(self._storage, MemoryStorage):
            readers = "read_metrics, read_layers, read_media or hookline.record.read_jsonl"
            raise AttributeError(f"this record is in the files of {self.path}; read it with {readers}")
        return self._storage.rows[kind]

    # ---- what is recorded --------------------------------------------------------------------------------------------

    def start(
        self,
        hooks: list[dict[str, Any]],
        *,
        lineage: Mapping[str, Any] | None = None,
        hosts: Sequence[str] | None = None,
        launch: Mapping[str, Any] | None = None,
        labels: Labels | None = None,
        training: Mapping[str, Any] | None = None,
    ) -> None:
        """Write run.json, config.yaml and labels.json; a run that continues keeps its start and its labels.

        It gets one more attempt.

        Args:
            hooks: The description of every hook.
            lineage: The run and checkpoint that a new run starts from.
            hosts: The machine of each rank, if there are several.
            launch: The launch that the run belongs to, if a launcher would start it again.
            labels: Name, tags and notes of a new run.
            training: Facts for judging the run: its optimizers, and whether its weights were trained before.

        Raises:
            RecordError: If the disk refuses; the run must not begin.
        """
        self._secrets.add(find_secrets(hooks))
        now, self._started = utc_now(), time.monotonic()
        attempt = {"started": now, "pid": os.getpid(), "host": platform.node(), **_ranks(hosts)}
        self.run = {
            "format": FORMAT,
            "run_id": self.run_id,
            "started": now,
            "git": dict(UNKNOWN_GIT_STATE),  # asking git and the machine is left to the storage
            "config_hash": config_hash(self._config),  # It hashes the redacted config, so that it reveals no secret.
            "environment": {},
            "seed": self._seed,
            "hooks": redact(hooks),
            "optimizers": [],
            **(training or {}),
            "lineage": None if lineage is None else redact(lineage),
            "attempts": [attempt if launch is None else {**attempt, "launch": dict(launch)}],
            "outcome": None,
        }
        self._labels = redact_labels(labels or Labels())
        try:
            self._storage.describe(self.run)
            self.defer(partial(self._storage.start, self.run, self._config, self._labels))
        except RecordError:  # the run does not begin, so another attempt in this process must get the lock
            self._storage.release()
            raise

    @property
    def is_tentative(self) -> bool:
        """Whether the run continues an earlier one and has made no step yet, so that its directory is unchanged."""
        return self._held is not None

    @property
    def had_ended(self) -> bool:
        """Whether the previous attempt ended without a failure, a signal or bad numbers."""
        before = [attempt.get("outcome") for attempt in self.run["attempts"][:-1]][-1:]
        return before in ([Outcome.COMPLETED], [Outcome.STOPPED])

    def defer(self, change: Callable[[], Any]) -> None:
        """Change something in the run's directory: now, or with the first step of a run that continues."""
        with self._holding:
            if self._held is not None:
                self._held.append(change)
                return
        change()

    def commit(self) -> None:
        """Make the changes that were deferred. A run calls this after its first step, and before it saves."""
        if self._held is None:
            return
        with self._holding:
            held, self._held = self._held, None
            for change in held or ():
                try:
                    change()
                except RecordError as error:
                    self._storage.report_loss(error)

    def reduce_as(self, reductions: Mapping[str, str | None]) -> None:
        """Say how the numbers of several ranks are combined, by metric; in one process there is nothing to do."""

    def share(self, part: SharedPart) -> None:
        """Contribute numbers that the ranks combine; in one process they are complete at once."""
        maxima = part.maxima()
        for name, value in part.finish(part.sizes, maxima, part.sums(maxima)).items():
            self.log(part.step, part.epoch, name, value)

    def log(self, step: int, epoch: int, name: str, value: Any, reduce: str | None = "mean") -> None:
        """Record a number or a one-element tensor; `reduce` is for several ranks.

        A number costs 0.2 µs, a tensor one small copy on its device; neither waits for a device.
        """
        if type(value) is not float:
            value = snapshot(name, value)
        if name in NOT_METRICS:
            where = "which marks where a run was resumed" if name == "resumed" else "a field of every row"
            raise RecordError(f"no metric can be named {name!r}, {where}; try 'train/{name}'")
        self._entries.append((step, epoch, name, value, time.time()))

    def extend(self, entries: Iterable[Entry]) -> None:
        """Record many values; tensors must be 0-dim and are not copied, so they must not be written to afterwards."""
        self._entries.extend(entries)

    def log_layers(
        self, series: str, step: int, names: Sequence[str], columns: Sequence[str], values: torch.Tensor
    ) -> None:
        """Record one step of a series; never waits for a device.

        Args:
            series: The name of the series.
            step: The step of the values.
            names: The layers. Names and columns are written once, so keep their order from step to step.
            columns: The statistics.
            values: Real numbers, [names, columns] or [names, columns, bins]; they are copied.

        Raises:
            RecordError: If the values do not fit the names and columns, or are not real numbers.
        """
        if not self._is_first:
            return
        shape, header = tuple(values.shape), self._headers.get(series)
        # Lists are not equal to the header's tuples; a caller who wants to save time passes the same tuples each step.
        if header is None or (header.names, header.columns, header.shape) != (names, columns, shape):
            bins = shape[2] if len(shape) == 3 else None
            header = SeriesHeader(redact_name(series), _clean(names), _clean(columns), bins)
            if shape != header.shape:
                expected = f"[{len(names)} names, {len(columns)} columns], or one more dimension for bins"
                raise RecordError(f"layers {series!r}: the values have the shape {list(shape)}; expected {expected}")
            self._headers[series] = header
        self._pending.append(layer_step(step, header, values))

    def log_table(
        self,
        step: int,
        epoch: int,
        name: str,
        columns: Iterable[str],
        rows: Iterable[Iterable[Any]],
        kind: str | None = None,
    ) -> None:
        """Record a table; its cells are copied now.

        Args:
            step: The step it belongs to.
            epoch: The epoch.
            name: Its name.
            columns: The titles of its columns.
            rows: The cells of each row, as `make_table` takes them.
            kind: The kind of table, as in `Table.kind`.

        Raises:
            RecordError: If a row or a cell does not fit, or there are too many.
        """
        if self._is_first:
            clean = media_name(name)
            self._pending.append(pending_media(step, epoch, clean, make_table(clean, columns, rows, kind)))

    def log_image(self, step: int, epoch: int, name: str, image: Any) -> None:
        """Record an image; one on a device is copied to the host without waiting, and encoded with the next flush.

        Args:
            step: The step it belongs to.
            epoch: The epoch.
            name: Its name.
            image: The image, as `make_image` takes it.

        Raises:
            RecordError: If it is not an image, or is too large.
        """
        if self._is_first:
            clean = media_name(name)
            self._pending.append(pending_media(step, epoch, clean, make_image(clean, image)))

    def event(self, kind: str, step: int | None = None, **fields: Any) -> None:
        """Record an event with its time and its hook; it is stored at once, without secrets."""
        row = {"time": round(time.time(), 6), "kind": redact_name(kind), "step": step, **redact(fields)}
        self._write("events", [row])

    def resume_at(self, step: int, epoch: int) -> None:
        """Record that the run continues from this step; what an earlier attempt wrote about later ones is discarded."""
        self.flush(wait=True)
        self.defer(partial(self._storage.resume_at, step))
        self.extend([(step, epoch, "resumed", True, time.time())])
        self.flush()

    # ---- where it goes -----------------------------------------------------------------------------------------------

    def add_sink(self, sink: Sink) -> SinkHandle:
        """Pass every row that is written from now on to a sink, in batches, when the record is flushed.

        A sink that raises is removed, with a warning in the log and an event ``sink_failed``.

        Returns:
            A handle whose `remove` disconnects the sink; it is also a context manager.

        Raises:
            RecordError: If the object has none of the methods of a `Sink`.
        """
        return self._sinks.add(sink)

    def add_own_sink(self, sink: Sink) -> SinkHandle:
        """Pass this process's metrics to a sink once they are on the host; with several ranks, before the exchange."""
        return self.add_sink(sink)

    def share_sinks(self, other: Record) -> None:
        """Use the added sinks of another record, such as the one that a trainer had before its run began."""
        self._sinks.share(other._sinks)

    def flush(self, *, wait: bool = False) -> None:
        """Write what is on the host, one row per step and series, and pass it to the sinks.

        The metrics that were logged since the last flush are copied to the host together. Those of a device that is
        still busy, and all later ones, are written by a later flush unless `wait` is True.
        """
        self._copy_entries()
        self._read(self._pending, wait)
        self._sinks.deliver(self._report_sink)

    def _copy_entries(self) -> None:
        """Begin to copy to the host the metrics that were logged since the last call."""
        with self._copying:
            # Appending to a list is atomic, so `log` needs no lock; only the entries that were counted are removed.
            count = len(self._entries)
            taken = self._entries[:count]
            del self._entries[:count]
            if taken:
                self._pending_metrics.append(MetricBatch(taken))

    def _read(self, queue: deque[Pending], wait: bool) -> None:
        """Write everything that has arrived on the host, or everything if `wait`."""
        while self._read_first(queue, wait):
            pass

    def _read_first(self, queue: deque[Pending], wait: bool) -> bool:
        """Write the first pending rows if they have arrived, or after a wait; return whether there may be more."""
        try:
            batch = queue[0]
        except IndexError:
            return False
        if not (wait or batch.is_ready()):
            return False
        with self._reading:  # only now: if the device never answers, another thread closes the record without a wait
            if queue and queue[0] is batch:  # no other thread was faster
                rows = batch.rows()
                queue.popleft()  # after the wait: a later flush reads the values that an interrupt left unread
                self._receive(batch, rows)
                if batch.lost:  # a device failed
                    self._storage.report_loss(batch.lost[0], len(batch.lost))
        return True

    def _receive(self, batch: Pending, rows: list[Any]) -> None:
        """Write what has arrived on the host."""
        self._write(batch.kind, rows)

    def sync(self) -> None:
        """Write everything recorded so far and wait until the disk has it; takes some milliseconds."""
        self.flush(wait=True)
        self._storage.sync()

    def close(
        self,
        outcome: str,
        reason: str | None,
        hooks: list[dict[str, Any]],
        costs: list[dict[str, Any]],
        counters: dict[str, Any],
    ) -> None:
        """Write what is left, as `finish` does, and close the files; a second call does nothing."""
        try:
            self.finish(outcome, reason, hooks, costs, counters)
        finally:
            self.close_files()

    def finish(
        self,
        outcome: str,
        reason: str | None,
        hooks: list[dict[str, Any]],
        costs: list[dict[str, Any]],
        counters: dict[str, Any],
        *,
        wait: bool = True,
    ) -> None:
        """Write what is left, then run.json with the outcome; `close_files` comes next. A second call does nothing.

        Args:
            outcome: "completed", "stopped", "non_finite", "interrupted" or "failed".
            reason: Why the run ended.
            hooks: The description of every hook.
            costs: The time that each hook took.
            counters: The numbers of steps, failures and so on.
            wait: Whether to wait for a device; False leaves out values that are not on the host yet.

        Raises:
            RecordError: If the outcome is not one of these; never for a failing disk or device.
        """
        if outcome not in list(Outcome):
            raise RecordError(f"{outcome!r} is not an outcome of a run; {nearest(outcome, map(str, Outcome))}")
        if self._closed:
            return
        reason = None if reason is None else cut(reason)
        self._closed = True  # before anything can fail, so that a close after an error in this one does nothing
        if not self.run:  # the run failed before it began
            try:
                self.start(hooks)
            except RecordError as error:
                self._storage.report_loss(error)
        try:
            self.flush(wait=wait)
        finally:  # Ctrl-C in a sink leaves a whole record, too
            end = {"outcome": str(outcome), "reason": redact(reason), "closed": utc_now()}
            self.run.update(end, hooks=redact(hooks), costs=redact(costs), counters=redact(counters), lost=self.lost)
            seconds = round(time.monotonic() - self._started, 3)  # the wall clock may change in the meantime
            if self.run.get("attempts"):  # a resumed run replaces the run's outcome, and the attempt keeps its own
                self.run["attempts"][-1].update(end, seconds=seconds)
            if not self.is_tentative:
                self._storage.end(self.run)
            self._sinks.close(self.run, self._report_sink)  # a sink may report what it could not deliver

    def close_files(self, verdict: Mapping[str, Any] | None = None) -> None:
        """Write run.json with the verdict on the run, if there is one, and let the next writer in; once."""
        if self._closed and not self._files_closed and not self.is_tentative:
            if verdict is not None:
                self.run["verdict"] = dict(verdict)
            self._files_closed = True
            self._storage.close(self.run)
        self._storage.release()

    def release(self) -> None:
        """Let the next writer in, even if closing has failed; a second call does nothing."""
        self._storage.release()

    def _write(self, kind: str, rows: list[Any]) -> None:
        """Write rows to the storage at once, and to the added sinks with the next delivery."""
        self.defer(partial(self._storage.write, kind, rows))
        self.defer(partial(self._sinks.put, kind, rows))  # a sink may be added with the first step, too

    def _report_sink(self, sink: Sink, step: int | None, error: Exception) -> None:
        name, text = type(sink).__name__, error_text(error)
        logger.warning("the sink %s failed and was removed; training continues: %s", name, redact_text(text))
        self.event("sink_failed", step, sink=name, error=text)


def _ranks(hosts: Sequence[str] | None) -> dict[str, Any]:
    """Return how many ranks there are, and which of them run on which machine; nothing for one process."""
    if hosts is None or len(hosts) == 1:
        return {}
    by_host = {host: [rank for rank, of_rank in enumerate(hosts) if of_rank == host] for host in dict.fromkeys(hosts)}
    return {"world_size": len(hosts), "ranks": by_host}


def _clean(names: Sequence[str]) -> tuple[str, ...]:
    """Return names without secrets; one that then equals another gets a number."""
    clean: list[str] = []
    for name in names:
        redacted = redact_name(name)
        clean.append(name if redacted == name else strict_json.free_name(redacted, dict.fromkeys(clean)))
    return tuple(clean)


def refuse_links(run_dir: Path) -> None:
    """Check that nothing that Hookline reads or writes in a run's directory is a symbolic link.

    A run from elsewhere could otherwise lead a resumed run to any file. Links to a neighbor, such as ``best`` in the
    directory of checkpoints, and files of others do not matter.

    Raises:
        RecordError: If there is one; the message names the first.
    """
    try:
        for name in CONTENTS:
            refuse_link(run_dir / name)
            for folder, folders, files in os.walk(run_dir / name):
                for path in (Path(folder) / entry for entry in (*folders, *files)):
                    if path.is_symlink() and path.readlink().name != str(path.readlink()):
                        refuse_link(path)
    except OSError as error:
        raise RecordError(explain(Path(error.filename), error)) from error
