"""The record of one run: its directory, what is in it from the first moment, and what closes it.

`Record` is what a training loop needs of it; `RunRecord` and the record in memory both are one.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from hookline.errors import RecordError
from hookline.record import jsonsafe, provenance
from hookline.record.description import check_outcome, describe_run, event_line, known_secrets, note_the_end
from hookline.record.layers import LayerBuffer, LayerLines
from hookline.record.lock import RunLock
from hookline.record.metrics import Entry, MetricBuffer
from hookline.record.reader import read_json
from hookline.record.redaction import redact, secrets_in
from hookline.record.writers import JsonLines, write_json_atomic, write_text_atomic

_SAFE_NAME = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*")


class Record(Protocol):
    """What a training loop writes to, on disk or in memory."""

    @property
    def run_id(self) -> str:
        """The run's id, also its directory's name."""

    @property
    def path(self) -> Path | None:
        """The run's directory; None for a record in memory."""

    @property
    def checkpoint_dir(self) -> Path | None:
        """Where the run's checkpoints belong; None for a record in memory."""

    @property
    def lost(self) -> int:
        """How many lines and values could not be written."""

    @property
    def lineage(self) -> Mapping[str, Any] | None:
        """The run and checkpoint that this one began from; None for one that began by itself."""

    def start(self, hooks: list[dict[str, Any]], *, lineage: Mapping[str, Any] | None = None) -> None:
        """Write what is known before the first step."""

    def log(self, step: int, epoch: int, name: str, value: Any) -> None:
        """Note a number or a one-element tensor; never waits for a device."""

    def extend(self, entries: Iterable[Entry]) -> None:
        """Note many at once; tensors must be 0-dim, and nobody may write to them any more: they are not copied."""

    def layers(
        self, series: str, step: int, names: Sequence[str], columns: Sequence[str], values: torch.Tensor
    ) -> None:
        """Note numbers per layer, [names, columns] or [names, columns, bins]; never waits for a device."""

    def resumed(self, step: int, epoch: int) -> None:
        """The run goes on from this step: what was written of later ones is no more."""

    def flush(self) -> None:
        """Write what has arrived, without waiting."""

    def settle(self) -> None:
        """Write everything noted so far, waiting for devices and disk: a checkpoint is about to vouch for it."""

    def event(self, kind: str, step: int | None = None, **fields: Any) -> None:
        """Write a decision and who made it, at once."""

    def close(
        self,
        outcome: str,
        reason: str | None,
        hooks: list[dict[str, Any]],
        costs: list[dict[str, Any]],
        counters: dict[str, Any],
    ) -> None:
        """Write what is left and how the run ended; the second call does nothing."""


class RunRecord:
    """The run's directory: run.json, config.yaml, metrics.jsonl, events.jsonl and, once there are any, layers.jsonl.

    Before the first step a directory that cannot be written is an error. From then on the record never stops
    the run: a line that the disk refuses is counted in `lost`, warned of once, and told in run.json at the
    close.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], seed: int | None) -> None:
        self.path = path
        self.run_id = path.name
        self.checkpoint_dir = path / "checkpoints"
        self._secrets = known_secrets(config)
        self._config = redact(config)
        self._seed = seed
        self._run: dict[str, Any] = {}
        self._closed = False
        self._losses = _Losses(path)
        self._lock = RunLock(path)
        self._event_lines = JsonLines(path / "events.jsonl")
        self._metric_lines = JsonLines(path / "metrics.jsonl")
        self._events = _Forgiving(self._event_lines, self._losses)
        self._metrics = MetricBuffer(_Forgiving(self._metric_lines, self._losses))
        self._layer_lines = LayerLines(path / "layers.jsonl")
        self._layers = LayerBuffer(_Forgiving(self._layer_lines, self._losses))
        # Directly: in the midst of training, where the caches hold other code, a call in between takes 1 to 2 µs.
        self.log, self.extend, self.layers = self._metrics.log, self._metrics.extend, self._layers.add

    @classmethod
    def create(
        cls, root: Path | str, *, config: Mapping[str, Any], seed: int | None, run_id: str | None = None
    ) -> RunRecord:
        """Make ``root/<run_id>/``. An id that exists is that run going on: its files are appended to."""
        if run_id is not None and not _SAFE_NAME.fullmatch(run_id):
            raise RecordError(f"{run_id!r} cannot be a run_id; use letters, digits, . _ = - and no leading .")
        return cls(_make_directory(Path(root), run_id).absolute(), config, seed)

    @property
    def lost(self) -> int:
        """How many lines and values could not be written."""
        return self._losses.count

    @property
    def lineage(self) -> Mapping[str, Any] | None:
        """The run and checkpoint that this one began from; None for one that began by itself."""
        return self._run.get("lineage")

    def start(self, hooks: list[dict[str, Any]], *, lineage: Mapping[str, Any] | None = None) -> None:
        """Write run.json and config.yaml. A run that goes on keeps its start and gets one more attempt."""
        self._secrets.learn(secrets_in(hooks))
        earlier = _earlier_run(self.path / "run.json")
        run = describe_run(self.run_id, self._config, self._seed, hooks)
        run["started"] = earlier.get("started", run["started"])
        run["git"] = provenance.git_state(Path.cwd())
        run["environment"] = provenance.environment()
        run["lineage"] = redact(lineage) if lineage is not None else earlier.get("lineage")
        run["attempts"] = [*earlier.get("attempts", []), *run["attempts"]]
        self._run = run
        try:
            write_text_atomic(self.path / "config.yaml", _as_yaml(self._config))
            write_json_atomic(self.path / "run.json", run)
        except RecordError:  # the run does not begin: who tries again must not find its own lock
            self._lock.release()
            raise

    def resumed(self, step: int, epoch: int) -> None:
        """Write that the run goes on from this step: what an earlier attempt wrote of later ones is no more."""
        self._layers.drain()
        self._losses.forgive(self._layer_lines.go_back, step)
        self._metrics.log(step, epoch, "resumed", True)
        self._metrics.flush()

    def flush(self) -> None:
        """Write what has arrived, one line per step and series, without waiting for a device."""
        self._metrics.flush()
        self._layers.flush()

    def settle(self) -> None:
        """Write everything noted so far, and wait until the disk has it; some milliseconds."""
        self._write_remaining()
        for lines in (self._metric_lines, self._event_lines):
            self._losses.forgive(lines.sync)

    def event(self, kind: str, step: int | None = None, **fields: Any) -> None:
        """Write one line to events.jsonl at once: what happened, when, by whom. Secrets are redacted."""
        self._events.write(event_line(kind, step, fields))

    def close(
        self,
        outcome: str,
        reason: str | None,
        hooks: list[dict[str, Any]],
        costs: list[dict[str, Any]],
        counters: dict[str, Any],
    ) -> None:
        """Write what is left, then run.json with the outcome. Never raises for a failing disk or device."""
        check_outcome(outcome)
        if self._closed:
            return
        self._closed = True
        if not self._run:  # the run failed before it began
            self._losses.forgive(self.start, hooks)
        self._write_remaining()
        note_the_end(self._run, outcome, reason, hooks, costs, counters, lost=self.lost)
        self._losses.forgive(write_json_atomic, self.path / "run.json", self._run)
        self._metric_lines.close()
        self._event_lines.close()
        self._layer_lines.close()
        self._lock.release()

    def _write_remaining(self) -> None:
        for buffer in (self._metrics, self._layers):
            try:
                buffer.drain()
            except Exception as error:  # a device that failed: the numbers on the host are still good
                self._losses.add(error, buffer.salvage())


class _Losses:
    """What the record could not write: counted always, warned of once."""

    def __init__(self, path: Path) -> None:
        self.count = 0
        self._path = path
        self._warned = False

    def add(self, error: Exception, lost: int = 1) -> None:
        self.count += lost
        if not self._warned:
            self._warned = True
            message = f"the record in {self._path} is losing data, training goes on: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=4)

    def forgive(self, write: Any, *arguments: Any) -> None:
        try:
            write(*arguments)
        except RecordError as error:
            self.add(error)


class _Forgiving:
    """A sink in front of a file that a running training may rely on never to raise."""

    def __init__(self, lines: JsonLines | LayerLines, losses: _Losses) -> None:
        self._write: Callable[[Any], None] = lines.write
        self._losses = losses

    def write(self, record: Any, /) -> None:
        try:
            self._write(record)
        except RecordError as error:
            self._losses.add(error)


def _make_directory(root: Path, run_id: str | None) -> Path:
    """A new run's directory must not exist yet: two runs never share one by accident."""
    path = root / (run_id or provenance.new_run_id())
    try:
        root.mkdir(parents=True, exist_ok=True)
        path.mkdir(exist_ok=run_id is not None)
        return path
    except OSError as error:
        reason = f"{error.filename or root}: {error.strerror or error}"
        remedy = "choose a directory that you can write to"
        raise RecordError(f"cannot make the run's directory in {root} ({reason}); {remedy}") from error


def _earlier_run(path: Path) -> dict[str, Any]:
    """The run.json of the attempts before this one; empty for a new run or one that cannot be read."""
    if not path.exists():
        return {}
    try:
        run = read_json(path)
    except RecordError as error:
        warnings.warn(f"{error}; the attempts before this one are not listed", RuntimeWarning, stacklevel=3)
        return {}
    return run if isinstance(run.get("attempts", []), list) else {}


def _as_yaml(config: Any) -> str:
    """Readable YAML; without PyYAML, or for what it cannot say, JSON, which is YAML too."""
    try:
        import yaml

        return str(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    except Exception:
        return jsonsafe.dumps(config, indent=2) + "\n"
