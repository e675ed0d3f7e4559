"""Watching a run: JSON lines and activation statistics. (What people see on the console has its own file.)"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import time
from typing import Any

from hookline.activations.monitor import Monitor
from hookline.events.policy import logger
from hookline.events.schedule import Schedule
from hookline.hooks.gradient_monitor import GradientMonitor
from hookline.hooks.named_hook import is_trial
from hookline.hooks.parameters import whole_number
from hookline.hooks.throughput import ThroughputMonitor
from hookline.record.redaction import redact
from hookline.record.writers import JsonLines
from hookline.registry.base import TrainingHook

__all__ = ["ActivationStats", "GradientMonitor", "JSONLogHook", "ThroughputMonitor"]  # two have files of their own


class JSONLogHook(TrainingHook):
    """Writes the run's progress as strict JSON, one object a line, to `path` or to log.jsonl in the run's directory."""

    built_in = True
    name = "json_log"

    def __init__(self, log_every_n_batches: int = 100, path: str | None = None) -> None:
        self.log_every_n_batches = whole_number(log_every_n_batches, "log_every_n_batches")
        self.path = path
        self.schedule = Schedule.parse(every=f"{log_every_n_batches} batches")
        self._lines: JsonLines | None = None
        self._told = False

    def on_train_start(self, trainer: Any, state: Mapping[str, Any]) -> None:
        self._write(trainer, "train_start", state, run_id=trainer.run_id)

    def on_train_batch_end(self, trainer: Any, state: Mapping[str, Any], step: int, tokens_seen: int) -> None:
        self._write(trainer, "batch_end", state, step=step, tokens_seen=tokens_seen, lr=trainer.lr)

    def on_epoch_end(self, trainer: Any, state: Mapping[str, Any], step: int) -> None:
        self._write(trainer, "epoch_end", state, step=step)

    def on_validation_end(self, trainer: Any, state: Mapping[str, Any], step: int, metrics: Mapping[str, Any]) -> None:
        self._write(trainer, "validation_end", state, step=step, metrics=dict(metrics))

    def on_train_end(self, trainer: Any, state: Mapping[str, Any], step: int) -> None:
        self._write(trainer, "train_end", state, step=step)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _write(self, trainer: Any, event: str, state: Mapping[str, Any], **more: Any) -> None:
        if self._lines is None and (where := self._where(trainer)) is not None:
            self._lines = JsonLines(where)
        if self._lines is not None:
            told = {key: value for key, value in state.items() if key not in ("model", "optimizer")}
            self._lines.write(redact({"event": event, "time": time(), **told, **more}))  # the state is everybody's

    def _where(self, trainer: Any) -> Path | None:
        """The file to write to; None, said once, when the run keeps no record on disk and nobody gave a path."""
        if is_trial(trainer):  # which writes nothing
            return None
        if self.path is not None:
            return Path(self.path)
        if trainer.run_dir is not None:
            return Path(trainer.run_dir) / "log.jsonl"
        if not self._told:
            self._told = True
            logger.warning("json_log writes nothing: this run keeps no record on disk; give json_log a path")
        return None


class ActivationStats(Monitor):
    """Mean and standard deviation of the selected modules' outputs, in layers.jsonl (read by `hookline.read_layers`).

    It is a `Monitor` of these two.
    """

    built_in = True
    name = "activation_stats"

    def __init__(self, modules: Any = "*") -> None:
        super().__init__(modules, metrics=("mean", "std"))
