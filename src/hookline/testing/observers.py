"""`EventRecorder`: which events a run fires; `MemorySink`: what it records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hookline.core.base import TrainingHook
from hookline.core.catalog import CATALOG
from hookline.record.format import MediaRow
from hookline.record.layers import LayerRow


class RecordedEvent(NamedTuple):
    """One event that a run has fired."""

    name: str
    step: int


class EventRecorder(TrainingHook):
    """A hook that records every lifecycle event, in order, with its step.

    >>> recorder = EventRecorder()
    >>> trainer.add_hook(recorder)  # doctest: +SKIP
    >>> assert recorder.names[-1] == "on_train_end"  # doctest: +SKIP
    """

    intervenes = False
    runs_last = True

    def __init__(self) -> None:
        self.events: list[RecordedEvent] = []

    @property
    def names(self) -> list[str]:
        """The names of the events, in order."""
        return [event.name for event in self.events]


def _method(name: str) -> Callable[[EventRecorder, int], None]:
    def record(self: EventRecorder, step: int) -> None:
        self.events.append(RecordedEvent(name, step))

    return record


for _event in CATALOG.values():
    if _event.kind == "lifecycle":
        setattr(EventRecorder, _event.name, _method(_event.name))


class MemorySink:
    """A sink that keeps every row of a record in lists: `metrics`, `layers`, `events` and `media`.

    >>> trainer.record.add_sink(sink := MemorySink())  # doctest: +SKIP
    >>> sink.values("train/loss")  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self.metrics: list[dict[str, Any]] = []
        self.layers: list[LayerRow] = []
        self.events: list[dict[str, Any]] = []
        self.media: list[MediaRow] = []
        self.run: Mapping[str, Any] | None = None
        """The fields of run.json, once the run has ended."""

    def write_metrics(self, rows: Sequence[dict[str, Any]]) -> None:
        """Keep rows of metrics.jsonl."""
        self.metrics += rows

    def write_layers(self, rows: Sequence[LayerRow]) -> None:
        """Keep statistics per layer."""
        self.layers += rows

    def write_events(self, rows: Sequence[dict[str, Any]]) -> None:
        """Keep rows of events.jsonl."""
        self.events += rows

    def write_media(self, rows: Sequence[MediaRow]) -> None:
        """Keep tables and images."""
        self.media += rows

    def close(self, run: Mapping[str, Any]) -> None:
        """Keep the fields of run.json."""
        self.run = run

    def values(self, metric: str) -> dict[int, float]:
        """Return the values of a metric, by step."""
        return {row["step"]: row[metric] for row in self.metrics if metric in row}
