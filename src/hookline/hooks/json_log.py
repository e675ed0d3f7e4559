"""`json_log`: write the run's progress as JSON lines."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from time import time
from typing import Any

from hookline._parameters import PositiveInt
from hookline.core.schedule import Schedule
from hookline.hooks.base import NamedHook, period
from hookline.record.json_lines import JsonLines
from hookline.record.redaction import redact
from hookline.run.control import RunControl


class JSONLogHook(NamedHook):
    """Writes the run's progress as strict JSON, one object per line.

    A `fast_dev_run` writes nothing.

    Args:
        log_every_n_batches: How often to write a line for a batch, in batches; an alternative to `every`.
        path: The file to write to; log.jsonl in the run's directory if not given.
        every: How often to write: 100 steps, "30 s", "10 batches".
    """

    built_in = True
    name = "json_log"
    ranks = "zero"

    every_aliases = ("log_every_n_batches",)

    def __init__(
        self, log_every_n_batches: PositiveInt = 100, path: str | None = None, every: int | str | None = None
    ) -> None:
        self.log_every_n_batches, self.path = log_every_n_batches, path
        self.schedule = Schedule.parse(every=period(self, every) or f"{log_every_n_batches} batches")
        self._lines: JsonLines | None = None

    def on_train_start(self, trainer: RunControl, state: Mapping[str, Any]) -> None:
        """Write the run's id."""
        self._write(trainer, "train_start", state, run_id=trainer.run_id)

    def on_train_batch_end(self, trainer: RunControl, state: Mapping[str, Any], step: int, tokens_seen: int) -> None:
        """Write the progress."""
        self._write(trainer, "batch_end", state, step=step, tokens_seen=tokens_seen, lr=trainer.lr)

    def on_epoch_end(self, trainer: RunControl, state: Mapping[str, Any], step: int) -> None:
        """Write the end of an epoch."""
        self._write(trainer, "epoch_end", state, step=step)

    def on_validation_end(
        self, trainer: RunControl, state: Mapping[str, Any], step: int, metrics: Mapping[str, Any]
    ) -> None:
        """Write the validation metrics."""
        self._write(trainer, "validation_end", state, step=step, metrics=dict(metrics))

    def on_train_end(self, trainer: RunControl, state: Mapping[str, Any], step: int) -> None:
        """Write the end of the run."""
        self._write(trainer, "train_end", state, step=step)

    def close(self) -> None:
        """Close the file."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _write(self, trainer: RunControl, event: str, state: Mapping[str, Any], **more: Any) -> None:
        # The model and the optimizer are objects; the rest of the state is numbers and strings. Hooks may add any key.
        plain = {key: value for key, value in state.items() if key not in ("model", "optimizer")}
        line = redact({"event": event, "time": time(), **plain, **more})
        # A run that is resumed and fails before its first step leaves its directory as it was.
        trainer.record.defer(partial(self._append, trainer, line))

    def _append(self, trainer: RunControl, line: dict[str, Any]) -> None:
        if self._lines is None and (path := self.output_path(trainer, "path", "log.jsonl")) is not None:
            # Nothing in a run's directory is written through a link; a path that the user chose may be one.
            self._lines = JsonLines(path if self.path is None else path.resolve())
        if self._lines is not None:
            self._lines.write(line)
