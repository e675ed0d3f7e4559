"""A record kept in lists, for tests and for runs that should leave nothing behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hookline.record import provenance
from hookline.record.description import check_outcome, describe_run, event_line, known_secrets, note_the_end
from hookline.record.layers import LayerBuffer, Layers
from hookline.record.metrics import MetricBuffer
from hookline.record.redaction import redact, secrets_in

_LAYERS_WEIGH = 100  # so many times as much as a record of scalars


class MemoryRecord:
    """A record that touches no disk: `metrics`, `events` and `layer_steps` are lists, `run` is as run.json.

    Each list keeps at least its last ``keep`` records, so that a long run does not fill the memory.
    """

    path: Path | None = None
    checkpoint_dir: Path | None = None
    lost = 0

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        seed: int | None = None,
        run_id: str | None = None,
        *,
        keep: int = 100_000,
    ) -> None:
        self.run_id = run_id or provenance.new_run_id()
        self.metrics: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.layer_steps: list[Layers] = []
        self.run: dict[str, Any] = {}
        self._secrets = known_secrets(config)
        self._config = redact(config or {})
        self._seed = seed
        self._closed = False
        self._event_sink = _ListSink(self.events, keep)
        self._buffer = MetricBuffer(_ListSink(self.metrics, keep))
        self._layers = LayerBuffer(_ListSink(self.layer_steps, keep // _LAYERS_WEIGH))
        self.extend = self._buffer.extend

    def start(self, hooks: list[dict[str, Any]], *, lineage: Mapping[str, Any] | None = None) -> None:
        """Fill `run`; git and the environment are left unknown, for asking would touch the disk."""
        self._secrets.learn(secrets_in(hooks))
        self.run = describe_run(self.run_id, self._config, self._seed, hooks)
        self.run["lineage"] = redact(lineage) if lineage is not None else None

    def log(self, step: int, epoch: int, name: str, value: Any) -> None:
        """Note a number or a one-element tensor; it is in `metrics` after a flush."""
        self._buffer.log(step, epoch, name, value)

    def layers(
        self, series: str, step: int, names: Sequence[str], columns: Sequence[str], values: torch.Tensor
    ) -> None:
        """Note numbers per layer; they are in `layer_steps` after a flush."""
        self._layers.add(series, step, names, columns, values)

    def resumed(self, step: int, epoch: int) -> None:
        """Forget the layers of later steps; `metrics` says where the run goes on, as on disk."""
        self._layers.drain()
        self.layer_steps[:] = [layers for layers in self.layer_steps if layers.step <= step]
        self._buffer.log(step, epoch, "resumed", True)
        self._buffer.flush()

    @property
    def lineage(self) -> Mapping[str, Any] | None:
        """The run and checkpoint that this one began from; None for one that began by itself."""
        return self.run.get("lineage")

    def settle(self) -> None:
        """Move everything to the lists, waiting for the devices."""
        self._buffer.drain()
        self._layers.drain()

    def flush(self) -> None:
        """Move what has arrived to `metrics` and `layer_steps`."""
        self._buffer.flush()
        self._layers.flush()

    def event(self, kind: str, step: int | None = None, **fields: Any) -> None:
        """Append one event, redacted as it would be on disk."""
        self._event_sink.write(event_line(kind, step, fields))

    def close(
        self,
        outcome: str,
        reason: str | None,
        hooks: list[dict[str, Any]],
        costs: list[dict[str, Any]],
        counters: dict[str, Any],
    ) -> None:
        """Drain what was noted and add the outcome; the second call does nothing."""
        check_outcome(outcome)
        if self._closed:
            return
        self._closed = True
        for buffer in (self._buffer, self._layers):
            try:
                buffer.drain()
            except Exception:
                self.lost += buffer.salvage()
        note_the_end(self.run, outcome, reason, hooks, costs, counters, lost=self.lost)


class _ListSink:
    """A sink that keeps the last records in a list, trimmed rarely."""

    def __init__(self, records: list[Any], keep: int) -> None:
        self._records = records
        self._keep = max(keep, 1)

    def write(self, record: Any, /) -> None:
        self._records.append(record)
        if len(self._records) >= 2 * self._keep:
            del self._records[: -self._keep]
