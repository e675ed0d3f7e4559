"""`Tracker`: the base class of hooks that send a run's record to a tracker, from a thread training never waits for."""

from __future__ import annotations

from bdb import BdbQuit
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from sys import getsizeof
from time import monotonic
from types import SimpleNamespace
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from annotated_types import Ge, Le
from numpy.typing import NDArray

from hookline._bins import bin_edges
from hookline._parameters import NonNegativeFloat
from hookline.core.rng_guard import TrainingStreams
from hookline.errors import HooklineError, TrainingError, error_text
from hookline.hooks.base import NamedHook, period
from hookline.hooks.queue import BackgroundQueue, TooLate, call_within, is_sending_suspended
from hookline.record.layers import LayerRow
from hookline.record.redaction import redact, redact_text
from hookline.record.sinks import KINDS, SinkHandle
from hookline.run.control import RunControl
from hookline.runs.histograms import HistogramReader, HistogramRow

MAX_TIMEOUT = 3600.0  # seconds
MIN_START = 30.0  # minimum seconds allowed for `check`: starting wandb's process can take that long
PAUSE = 2.0  # seconds between two calls of `_write`, in which rows gather: MLflow takes 5 ms for a call with any rows
ENTRY_BYTES = 200  # approximate bytes of one dict entry or table cell: the key, the value and their slots
FIELDS = ("step", "epoch", "time")  # Every row of metrics has these.


@dataclass(frozen=True)
class TrackedRun:
    """The facts about a run that a tracker gets at its start, without secrets."""

    run_id: str
    directory: Path | None
    config: Mapping[str, Any]
    """The config as config.yaml has it."""
    description: Mapping[str, Any]
    """The fields of run.json."""
    resumed_at: int | None
    """The step after which an earlier attempt is continued; None for a new run."""
    name: str | None = None
    tags: tuple[str, ...] = ()
    notes: str | None = None


class Histogram(NamedTuple):
    """Counts between edges; there is one more edge than counts."""

    tag: str
    edges: NDArray[np.float64]
    counts: NDArray[np.float64]

    def merged(self, max_bins: int) -> Histogram:
        """Return a histogram with at most `max_bins` bins, each of which is the sum of neighboring ones."""
        starts = np.arange(0, len(self.counts), -(-len(self.counts) // max_bins))
        return Histogram(self.tag, np.append(self.edges[starts], self.edges[-1]), np.add.reduceat(self.counts, starts))


class Tracker(NamedHook):
    """Sends every row of the record to a tracker; a subclass implements `open`, the `write_` methods and `finish`.

    These methods are called in a thread. Training neither waits for them nor fails with them: rows that do not fit
    into the queue are dropped and counted; a tracker that raises is reported once and gets no more rows. A
    `fast_dev_run` and `hookline verify` send nothing. The methods must not draw from the global random streams of
    `random`, `numpy.random` and `torch`: a draw would change training, at a moment that differs from run to run.

    Args:
        layers: Which statistics per layer to send: "histograms" (series with bins), "all" (also each number of the
            others, thousands in a large model) or "none".
        queue_mb: How many megabytes of rows may wait.
        timeout: Seconds that the end of the run waits for queued rows; then the tracker is abandoned.
        every: For each metric, the first value in every N steps and the last one of the run are sent; by default
            each value. Metrics that are measured less often are sent as they come. Clients take up to 0.2 ms for a row,
            in a thread that shares Python's lock with training: for steps of a few milliseconds, use 10 or more.

    Raises:
        ConfigError: If a parameter has an invalid value.
    """

    ranks = "zero"
    on_error = "disable"
    package = ""
    """What to import; nothing if it is empty."""
    extra = ""
    """The extra of hookline that installs the package; without one, the package itself is named."""

    def __init__(
        self,
        layers: Literal["histograms", "all", "none"] = "histograms",
        queue_mb: NonNegativeFloat = 64.0,
        timeout: Annotated[float, Ge(0), Le(MAX_TIMEOUT)] = 10.0,
        every: int | str | None = None,
    ) -> None:
        steps = period(self, every, ("steps",))
        self.every = 1 if steps is None else int(steps.amount)
        self._sent: dict[str, int] = {}  # by metric, in which period the last value was sent
        self._withheld: dict[str, Mapping[str, Any]] = {}  # by metric, the row of the last value if it was not sent
        self.layers, self.queue_mb, self.timeout = layers, queue_mb, timeout
        self._tracked: tuple[RunControl, BackgroundQueue, SinkHandle] | None = None  # the run, until `_stop`
        self._run_at_end: Mapping[str, Any] = {}  # the fields of run.json at its end
        self._histograms = HistogramReader()
        self._is_ending = False

    # ---- for subclasses ----------------------------------------------------------------------------------------------

    def check(self, run: TrackedRun) -> None:
        """Raise `TrainingError` before the first step if the tracker cannot work; must not wait for a network.

        Any other exception disables the tracker, and so does a check that does not return.
        """

    def open(self, run: TrackedRun) -> None:
        """Begin to track a run, or continue one that was tracked before; the package can be imported."""

    def write_metrics(self, rows: Sequence[dict[str, Any]]) -> None:
        """Send rows of metrics: `step`, `epoch`, `time` and one number per metric."""

    def write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Send the statistics of a series at a step, by name; called for ``layers: all``."""

    def write_histogram(self, step: int, histogram: Histogram) -> None:
        """Send the histogram of one layer at a step."""

    def write_events(self, rows: Sequence[dict[str, Any]]) -> None:
        """Send events: `time`, `kind`, `step` and the event's own fields."""

    def write_media(self, rows: Sequence[Any]) -> None:
        """Send images, whose `content` has `png`, and tables, whose `content` has `columns` and `rows`."""

    def finish(self, run: Mapping[str, Any]) -> None:
        """Send the remaining rows and disconnect; `run` has the fields of run.json, including the outcome."""

    # ---- the hook ----------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Leave the registration and the run out of copies."""
        return {**vars(self), **dict.fromkeys(("_registered_name", "_tracked"))}

    def check_run(self, trainer: RunControl) -> None:
        """Import the package before the run has a directory; raises `TrainingError` if it is missing."""
        if trainer.is_trial_run or is_sending_suspended():
            return
        try:
            self._import_package()
        except HooklineError:
            raise
        except Exception:  # A broken package: on_train_start imports it again and reports the error.
            return

    def on_train_start(self, trainer: RunControl) -> None:
        """Import the package, check the tracker, and start its thread."""
        self._warned_once, self._is_ending = frozenset(), False
        if trainer.is_trial_run or is_sending_suspended():
            return
        run = describe_run(trainer)
        if not self._can_start(trainer, run):
            return
        self._histograms, self._sent, self._withheld = HistogramReader(), {}, {}
        # At the first step, because a resume that fails before it must not touch what the tracker has of earlier
        # attempts.
        trainer.record.defer(partial(self._start, trainer, run))

    def _start(self, trainer: RunControl, run: TrackedRun) -> None:
        """Start the thread, and pass it every row of the record from now on."""
        if self._is_ending:  # the hook was removed in the first step
            return
        # The queue reports no failure after it was abandoned: the record is closed by then, and says so.
        on_error = partial(self._report_failure, trainer)
        work, limit = partial(self._work, run), int(self.queue_mb * 1e6)
        queue = BackgroundQueue(work, limit, on_error=on_error, name="hookline-tracker")
        sink: Any = SimpleNamespace(close=self._stop)
        for kind in KINDS:
            setattr(sink, f"write_{kind}", partial(self._put, queue, kind))
        self._tracked = trainer, queue, trainer.record.add_sink(sink)

    def _can_start(self, trainer: RunControl, run: TrackedRun) -> bool:
        """Import the package and check the tracker; only the user's own mistake ends the run, before the first step."""
        limit = max(self.timeout, MIN_START)
        try:
            self._import_package()  # again: the hook may have been registered or enabled since `check_run`
            call_within(limit, partial(self.check, run), "hookline-tracker")
            return True
        except HooklineError as error:
            error.always_raise = True  # type: ignore[attr-defined]
            raise
        except TooLate:
            self._report_abandoned(trainer, limit, 0)
        except (KeyboardInterrupt, BdbQuit):
            raise
        except BaseException as error:  # SystemExit, too
            self._report_failure(trainer, error)
        return False

    def on_train_end(self) -> None:
        """Keep tracking after the hooks are closed: the last rows arrive when the record is closed."""
        self._is_ending = True

    def close(self) -> None:
        """Stop tracking, if the hook was removed during the run."""
        if not self._is_ending and self._tracked is not None:
            self._stop(self._tracked[0].record.run)
        self._is_ending = True

    def _stop(self, run: Mapping[str, Any]) -> None:
        """Wait for queued rows, at most `timeout` seconds, and report lost ones."""
        if self._tracked is None:
            return
        trainer, queue, handle = self._tracked
        self._tracked, self._run_at_end = None, dict(run)
        handle.remove()
        began = monotonic()
        try:
            queue.close(self.timeout)
        finally:  # Ctrl-C ends the wait, too
            if queue.is_alive:
                self._report_abandoned(trainer, min(monotonic() - began, self.timeout), queue.left)
            if queue.dropped:
                self.warn(f"dropped {queue.dropped} rows, because more than {self.queue_mb:g} MB were waiting")
                self._record(trainer, "tracker_dropped_rows", rows=queue.dropped)

    def _put(self, queue: BackgroundQueue, kind: str, rows: Sequence[Any]) -> None:
        """Queue rows of the record for the thread; returns at once."""
        if queue.is_alive and not (kind == "layers" and self.layers == "none"):
            size = sum(map(len, rows)) * ENTRY_BYTES if kind == "metrics" else sum(map(size_of, rows))
            queue.put((kind, rows), size, len(rows))

    def _report_abandoned(self, trainer: RunControl, seconds: float, rows: int) -> None:
        waited = float(f"{seconds:.3g}")
        self.warn(f"did not finish within {waited:g} s and was abandoned; {rows} rows were not sent")
        self._record(trainer, "tracker_abandoned", seconds=waited, rows=rows)

    def _report_failure(self, trainer: RunControl, error: BaseException) -> None:
        """Warn that the tracker has failed; called in its thread."""
        text = redact_text(error_text(error))
        self.warn(f"failed and was disabled; training continues: {text}", once="failed")
        self._record(trainer, "tracker_failed", error=text)

    def _work(self, run: TrackedRun, queue: BackgroundQueue) -> None:
        """Track the run from its beginning to its end; called in the thread."""
        self.open(run)
        while batches := queue.take(group=itemgetter(0), pause=PAUSE):
            self._write(batches[0][0], [row for _, rows in batches for row in rows])
        self._finish(self._run_at_end)

    def _write(self, kind: str, rows: Sequence[Any]) -> None:
        """Send rows; called in the thread."""
        if kind == "metrics" and self.every > 1:
            rows = [thinned for row in rows if (thinned := self._first_of_period(row))]
        if kind != "layers":
            getattr(self, f"write_{kind}")(rows)
            return
        for row in rows:
            for histogram_row in self._histograms.read(row.step, row.header, row.values.numpy()):
                for histogram in histograms(histogram_row):
                    self.write_histogram(row.step, histogram)
            if row.header.bins is None and self.layers == "all":
                self.write_scalars(row.step, scalars(row))

    def _finish(self, run: Mapping[str, Any]) -> None:
        """Send the last values that `every` has withheld, and finish; called in the thread."""
        rows: dict[int, dict[str, Any]] = {}
        for name, row in self._withheld.items():
            rows.setdefault(row["step"], {field: row[field] for field in FIELDS})[name] = row[name]
        if rows:
            self.write_metrics([rows[step] for step in sorted(rows)])
        self.finish(run)

    def _first_of_period(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row with the metrics that have not been sent in this period yet; empty if there are none."""
        number = row["step"] // self.every
        new = {name: value for name, value in row.items() if name not in FIELDS and self._sent.get(name) != number}
        self._sent.update(dict.fromkeys(new, number))
        for name in row.keys() - FIELDS:
            if name in new:
                self._withheld.pop(name, None)
            else:
                self._withheld[name] = row
        return {**{name: row[name] for name in FIELDS}, **new} if new else {}

    def _record(self, trainer: RunControl, kind: str, **fields: Any) -> None:
        trainer.record.event(kind, trainer.step, by=self.registered_name, **fields)

    def _import_package(self) -> None:
        streams = TrainingStreams()
        try:
            streams.guard(self.import_package, streams.restore)()  # importing trackio draws random numbers
        except ImportError as error:
            install = f"hookline[{self.extra}]" if self.extra else self.package
            missing = f"it needs the package {self.package} (pip install {install!r}): {error}"
            raise TrainingError(f"hook {self.registered_name!r}: {missing}") from None

    def import_package(self) -> None:
        """Import what `open` uses."""
        if self.package:
            import_module(self.package)


def describe_run(trainer: RunControl) -> TrackedRun:
    """Return the facts that a tracker may know about a run, without secrets."""
    record = trainer.record
    continued = len(record.run.get("attempts", [])) > 1
    labels = record.labels
    return TrackedRun(
        record.run_id, trainer.run_dir, redact(trainer.describe()), dict(record.run),
        trainer.step if continued else None,
        labels.name, labels.tags, labels.notes,
    )  # fmt: skip


def size_of(row: Any) -> int:
    """Estimate how many bytes a row of layers, events or media takes."""
    if isinstance(row, dict):
        return _size_of_values(row.values())
    if (values := getattr(row, "values", None)) is not None:
        return int(values.nbytes)
    content = row.content
    if (png := getattr(content, "png", None)) is not None:
        return len(png)
    return _size_of_values(content.columns) + sum(map(_size_of_values, content.rows))


def _size_of_values(values: Collection[Any]) -> int:
    """Estimate how many bytes values and their slots take: numbers have one size, strings and lists vary."""
    size = len(values) * ENTRY_BYTES
    for value in values:
        if isinstance(value, str):
            size += getsizeof(value)
        elif isinstance(value, dict):
            size += _size_of_values(value.values())
        elif isinstance(value, (list, tuple)):
            size += _size_of_values(value)
    return size


def values_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a row as floats, without its step, epoch and time."""
    return {name: float(value) for name, value in row.items() if name not in FIELDS and value is not None}


def flatten(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a config with its dotted path; lists count as mappings of their indices."""
    if not isinstance(config, (Mapping, list, tuple)):
        yield path, config
        return
    for key, value in config.items() if isinstance(config, Mapping) else enumerate(config):
        yield from flatten(value, f"{path}.{key}" if path else str(key))


def event_text(row: Mapping[str, Any]) -> str:
    """Return an event's fields as text in one line."""
    return ", ".join(f"{key}: {value}" for key, value in row.items() if key not in ("time", "kind", "step"))


# ---- statistics per layer --------------------------------------------------------------------------------------------


def scalars(row: LayerRow) -> dict[str, float]:
    """Return every number of a row without bins as ``<series>/<layer>/<column>``."""
    header = row.header
    tags = [f"{header.series}/{name}/{column}" for name in header.names for column in header.columns]
    return dict(zip(tags, row.values.flatten().tolist(), strict=True))


def histograms(row: HistogramRow) -> Iterator[Histogram]:
    """Yield the histogram of each layer of which anything finite was counted, from its first filled bin to its last."""
    for index, name in enumerate(row.names):
        counts = row.counts[index].astype(np.float64)
        edges = np.arange(len(counts) + 1.0)  # Bins of unknown meaning get numbers as edges.
        if row.tops is not None:
            low, high = bin_edges(len(counts), float(row.tops[index]))
            edges, counts = np.append(low[1:-2], high[-3]), counts[1:-2]  # infinities and NaN have no edges
            # Trackers need increasing edges, so the bin of zeros ends with the smallest number above 0.
            edges[len(counts) // 2 + 1] = np.nextafter(0.0, 1.0)
        filled = np.flatnonzero(counts > 0)
        if filled.size:
            first, last = filled[0], filled[-1] + 1
            tag = f"{row.series}/{name}" + (f"/{row.column}" if row.has_columns else "")
            yield Histogram(tag, edges[first : last + 1], counts[first:last])
