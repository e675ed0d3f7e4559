"""The record of a run: every metric, statistic per layer and event, passed to sinks.

The first sink stores the record, in the run's files or in memory. Any number of others may be added.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hookline.errors import RecordError, nearest
from hookline.record.layers import LayerBuffer, LayerRow
from hookline.record.metrics import Entry, MetricBuffer
from hookline.record.provenance import config_hash, new_run_id, unknown_git_state, utc_now
from hookline.record.redaction import find_secrets, redact, redact_text, secrets_of_run
from hookline.record.sinks import AddedSinks, FileSink, MemorySink, Sink, SinkHandle

OUTCOMES = ("completed", "stopped", "interrupted", "failed")

_SAFE_NAME = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*")

logger = logging.getLogger("hookline")


class Record:
    """What a run did, from which code and config; made with `on_disk` or `in_memory`.

    Values are logged without waiting for a device. `flush` writes those that are on the host and passes them to the
    added sinks; `close` does so for everything. No failure of a disk, a device or a sink ends training.

    Args:
        storage: Where the record is kept.
        config: The run's resolved config; secrets are removed.
        seed: The run's seed.
        run_id: The run's id.
    """

    def __init__(
        self, storage: FileSink | MemorySink, config: Mapping[str, Any] | None, seed: int | None, run_id: str
    ) -> None:
        self.run_id = run_id
        self.run: dict[str, Any] = {}  # the fields of run.json, empty before `start`
        self._storage = storage
        self._secrets = secrets_of_run(config)
        self._config = redact(config or {})
        self._seed = seed
        self._closed = False
        self._sinks = AddedSinks()
        # Not bound methods: in a reference cycle, a record that is dropped would keep its lock and secrets for a while.
        self._metrics = MetricBuffer(partial(_store, storage, self._sinks, "write_metrics"))
        self._layers = LayerBuffer(partial(_store, storage, self._sinks, "write_layers"))

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
        path = (Path(root) / (run_id or new_run_id())).absolute()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(exist_ok=run_id is not None)  # a new run's must not exist: two runs never share one by accident
        except OSError as error:
            reason = f"{error.filename or root}: {error.strerror or error}"
            remedy = "choose a directory that you can write to"
            raise RecordError(f"cannot make the run's directory in {root} ({reason}); {remedy}") from error
        return cls(FileSink(path), config, seed, path.name)

    @classmethod
    def in_memory(
        cls,
        config: Mapping[str, Any] | None = None,
        seed: int | None = None,
        run_id: str | None = None,
        *,
        keep: int = 100_000,
    ) -> Record:
        """Make a record in lists, `metrics`, `layer_rows` and `events`, that touches no disk.

        Args:
            config: The run's resolved config.
            seed: The run's seed.
            run_id: The run's id; a new one if None.
            keep: How many rows each list keeps at least.
        """
        return cls(MemorySink(keep), config, seed, run_id or new_run_id())

    # ---- what the record is ------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path | None:
        """The run's directory; None in memory."""
        return self._storage.path

    @property
    def checkpoint_dir(self) -> Path | None:
        """Where the run's checkpoints belong; None in memory."""
        return None if self.path is None else self.path / "checkpoints"

    @property
    def lost(self) -> int:
        """How many lines and values could not be written."""
        return self._storage.lost

    @property
    def lineage(self) -> Mapping[str, Any] | None:
        """The run and checkpoint that this run was started from; None if there is none."""
        return self.run.get("lineage")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics of a record in memory."""
        return self._memory.metrics

    @property
    def layer_rows(self) -> list[LayerRow]:
        """The rows of layers of a record in memory."""
        return self._memory.layer_rows

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events of a record in memory."""
        return self._memory.events

    @property
    def _memory(self) -> MemorySink:
        if not isinstance(self._storage, MemorySink):
            readers = "read_metrics, read_layers or hookline.record.read_jsonl"
            raise AttributeError(f"this record is in the files of {self.path}; read it with {readers}")
        return self._storage

    # ---- what is recorded --------------------------------------------------------------------------------------------

    def start(self, hooks: list[dict[str, Any]], *, lineage: Mapping[str, Any] | None = None) -> None:
        """Write run.json and config.yaml; a run that continues keeps its start and gets one more attempt.

        Raises:
            RecordError: If the disk refuses; the run must not begin.
        """
        self._secrets.add(find_secrets(hooks))
        now = utc_now()
        self.run = {
            "run_id": self.run_id,
            "started": now,
            "git": unknown_git_state(),  # asking git and the machine is left to the storage
            "config_hash": config_hash(self._config),  # of the redacted config, so that it reveals no secret
            "environment": {},
            "seed": self._seed,
            "hooks": redact(hooks),
            "lineage": None if lineage is None else redact(lineage),
            "attempts": [{"started": now, "pid": os.getpid(), "host": platform.node()}],
            "outcome": None,
        }
        self._storage.start(self.run, self._config)

    def log(self, step: int, epoch: int, name: str, value: Any) -> None:
        """Record a number or a one-element tensor; never waits for a device."""
        self._metrics.log(step, epoch, name, value)

    def extend(self, entries: Iterable[Entry]) -> None:
        """Record many values; tensors must be 0-dim and are not copied, so they must not be written to any more."""
        self._metrics.extend(entries)

    def log_layers(
        self, series: str, step: int, names: Sequence[str], columns: Sequence[str], values: torch.Tensor
    ) -> None:
        """Record numbers per layer, [names, columns] or [names, columns, bins]; never waits for a device."""
        self._layers.add(series, step, names, columns, values)

    def event(self, kind: str, step: int | None = None, **fields: Any) -> None:
        """Record what happened, when and because of which hook; stored at once, without secrets."""
        row = {"time": round(time.time(), 6), "kind": kind, "step": step, **redact(fields)}
        _store(self._storage, self._sinks, "write_events", [row])

    def resume_at(self, step: int, epoch: int) -> None:
        """Record that the run continues from this step; what an earlier attempt wrote about later ones is discarded."""
        self._layers.drain()
        self._storage.resume_at(step)
        self._metrics.log(step, epoch, "resumed", True)
        self.flush()

    # ---- where it goes -----------------------------------------------------------------------------------------------

    def add_sink(self, sink: Sink) -> SinkHandle:
        """Pass every row that is written from now on to a sink, in batches, when the record is flushed.

        A sink that raises is removed, with a warning in the log and an event ``sink_failed``.

        Returns:
            A handle whose `remove` disconnects the sink; it is also a context manager.

        Raises:
            RecordError: If the object lacks one of the methods of `Sink`.
        """
        return self._sinks.add(sink)

    def share_sinks(self, other: Record) -> None:
        """Use the added sinks of another record, such as the one that a trainer had before its run began."""
        self._sinks.share(other._sinks)

    def flush(self) -> None:
        """Write what is on the host, one row per step and series, without waiting for a device."""
        self._metrics.flush()
        self._layers.flush()
        self._sinks.deliver(self._report_sink)

    def sync(self) -> None:
        """Write everything recorded so far and wait until the disk has it; takes some milliseconds."""
        self._drain()
        self._storage.sync()

    def close(
        self,
        outcome: str,
        reason: str | None,
        hooks: list[dict[str, Any]],
        costs: list[dict[str, Any]],
        counters: dict[str, Any],
    ) -> None:
        """Write what is left, then run.json with the outcome; a second call does nothing.

        Args:
            outcome: "completed", "stopped", "interrupted" or "failed".
            reason: Why the run ended.
            hooks: The description of every hook.
            costs: The time that each hook took.
            counters: The numbers of steps, failures and so on.

        Raises:
            RecordError: If the outcome is not one of the four; never for a failing disk or device.
        """
        if outcome not in OUTCOMES:
            raise RecordError(f"{outcome!r} is not an outcome of a run; {nearest(outcome, OUTCOMES)}")
        if self._closed:
            return
        self._closed = True
        if not self.run:  # the run failed before it began
            try:
                self.start(hooks)
            except RecordError as error:
                self._storage.report_loss(error)
        self._drain()
        end = {"outcome": outcome, "reason": redact(reason), "closed": utc_now()}
        self.run.update(end, hooks=redact(hooks), costs=costs, counters=counters, lost=self.lost)
        if self.run.get("attempts"):  # a resumed run replaces the run's outcome, and the attempt keeps its own
            self.run["attempts"][-1].update(end)
        self._storage.close(self.run)

    def _drain(self) -> None:
        """Write everything, waiting for the devices, and pass it to the sinks."""
        for buffer in (self._metrics, self._layers):
            try:
                buffer.drain()
            except Exception as error:  # a device failed; the numbers on the host are still good
                self._storage.report_loss(error, buffer.salvage())
        self._sinks.deliver(self._report_sink)

    def _report_sink(self, sink: Sink, step: int | None, error: Exception) -> None:
        name, text = type(sink).__name__, f"{type(error).__name__}: {error}"
        logger.warning("the sink %s failed and was removed, training continues: %s", name, redact_text(text))
        self.event("sink_failed", step, sink=name, error=text)


def _store(storage: FileSink | MemorySink, sinks: AddedSinks, method: str, rows: list[Any]) -> None:
    """Write rows with a method of `Sink`: to the storage at once, to the added sinks with the next delivery."""
    getattr(storage, method)(rows)
    sinks.put(method, rows)
