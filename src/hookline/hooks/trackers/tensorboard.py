"""`tensorboard`: write the record as event files that TensorBoard reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from hookline.errors import TrainingError
from hookline.hooks.trackers.base import Histogram, TrackedRun, Tracker, event_text, flatten, values_of

if TYPE_CHECKING:
    from hookline._keywords import TrackerKeywords

DIRECTORY = "tensorboard"
MAX_METRICS = 200  # in the table of hyperparameters
_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}  # By the color type of a PNG.


class TensorBoardTracker(Tracker):
    """Writes TensorBoard event files: scalars, histograms, text, images and hyperparameters.

    A resumed run continues in the same directory, and TensorBoard hides what earlier attempts wrote about later steps.

    Args:
        directory: Where to write; ``tensorboard`` in the run's directory if not given.
        layers: Which statistics per layer to write: "histograms", "all" or "none".
        queue_mb: How many megabytes of rows may wait.
        timeout: Seconds that the end of the run waits for queued rows.
        every: How often to send a metric, in steps; by default each of its values.
    """

    built_in = True
    name = "tensorboard"
    package = extra = "tensorboard"

    def __init__(self, directory: str | None = None, **settings: Unpack[TrackerKeywords]) -> None:
        super().__init__(**settings)
        self.directory = directory

    def check(self, run: TrackedRun) -> None:
        """Require a directory."""
        if self.directory is None and run.directory is None:
            problem = "this run has no record on disk; give it a directory"
            raise TrainingError(f"hook {self.registered_name!r}: {problem}")

    def import_package(self) -> None:
        """Import PyTorch's writer, which needs the package."""
        import torch.utils.tensorboard  # noqa: F401

    def open(self, run: TrackedRun) -> None:
        """Open an event file, and write the config and the notes into it."""
        from torch.utils.tensorboard import SummaryWriter

        where = run.directory / DIRECTORY if self.directory is None and run.directory else self.directory
        # From this step on, readers hide the contents of the directory's other files.
        purge = None if run.resumed_at is None else run.resumed_at + 1
        self._writer: Any = SummaryWriter(log_dir=str(where), purge_step=purge)
        self._hparams, self._last = dict(flatten(run.config)), dict[str, float]()
        step = run.resumed_at or 0
        config = json.dumps(run.config, indent=2, default=str, ensure_ascii=False)
        self._writer.add_text("config", f"```json\n{config}\n```", step)
        labels = {"name": run.name, "tags": ", ".join(run.tags), "notes": run.notes}
        for key, text in labels.items():
            if text:
                self._writer.add_text(f"run/{key}", text, step)
        self._writer.flush()

    def write_metrics(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write each number as a scalar at its step."""
        for row in rows:
            values = values_of(row)
            self._last.update(values)
            self.write_scalars(row["step"], values, row["time"])
        self._writer.flush()

    def write_scalars(self, step: int, values: Mapping[str, float], time: float | None = None) -> None:
        """Write numbers as scalars, at the current time unless given."""
        self._add([{"tag": name, "simple_value": value} for name, value in values.items()], step, time)

    def write_histogram(self, step: int, histogram: Histogram) -> None:
        """Write a histogram with the record's own bins."""
        tag, edges, counts = histogram
        middles = (edges[1:] + edges[:-1]) / 2
        self._writer.add_histogram_raw(
            tag, min=edges[0], max=edges[-1], num=counts.sum(), sum=np.dot(middles, counts),
            sum_squares=np.dot(middles**2, counts), bucket_limits=edges[1:].tolist(), bucket_counts=counts.tolist(),
            global_step=step,
        )  # fmt: skip

    def write_events(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write each event as text, under its kind."""
        for row in rows:
            self._writer.add_text(f"events/{row['kind']}", event_text(row) or row["kind"], row["step"], row["time"])
        self._writer.flush()

    def write_media(self, rows: Sequence[Any]) -> None:
        """Write images as they are, and tables as text."""
        for row in rows:
            if (png := getattr(row.content, "png", None)) is not None:
                channels = _CHANNELS.get(png[25], 3)
                image = {"height": row.content.height, "width": row.content.width, "colorspace": channels}
                self._add([{"tag": row.name, "image": {**image, "encoded_image_string": png}}], row.step, row.time)
            else:
                self._writer.add_text(row.name, markdown(row.content), row.step, row.time)
        self._writer.flush()

    def finish(self, run: Mapping[str, Any]) -> None:
        """Write the hyperparameters with the last value of each metric, and close the file."""
        from torch.utils.tensorboard.summary import hparams

        plain = {key: value for key, value in self._hparams.items() if isinstance(value, (bool, int, float, str))}
        last = dict(list(self._last.items())[:MAX_METRICS])
        for summary in hparams(plain, last):
            self._writer.file_writer.add_summary(summary)
        self._writer.close()

    def _add(self, values: Sequence[Mapping[str, Any]], step: int, time: float | None = None) -> None:
        """Write values as one event; the writer's own methods write one event for each number."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._writer.file_writer.add_summary(Summary(value=values), step, time)


def markdown(table: Any) -> str:
    """Return a table as Markdown."""
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
