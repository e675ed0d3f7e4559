"""The monitoring hook: statistics of activations, and what each module's forward costs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from hookline.activations.moment import first_floating
from hookline.activations.sites import weakly
from hookline.errors import ConfigError, nearest
from hookline.registry.base import ForwardHook
from hookline.stats.collector import Collector
from hookline.stats.columns import STATISTICS
from hookline.stats.flush import Flush

COSTS = ("time", "memory")
DEFAULT = ("mean", "std", "absmax", "zeros", "nans", "infs")
KEPT = 1000  # values per module


class Monitor(ForwardHook):
    """Statistics (mean, std, min, max, absmax, l2, zeros, nans, infs, count), time and memory of the selected modules.

    Tensors are gathered while the model runs and read together in one pass; values stay on the device and arrive a
    flush later, under their true step. With a trainer they are logged as ``activations/<module>/<metric>``.
    """

    built_in = True
    name = "monitor"

    def __init__(self, modules: Any = "*", metrics: Sequence[str] | None = None) -> None:
        self.modules = weakly(modules)
        self.metrics = tuple(metrics) if metrics is not None else DEFAULT
        for metric in self.metrics:
            if metric not in (*STATISTICS, *COSTS):
                raise ConfigError(
                    "metrics", f"{metric!r} is no metric; {nearest(str(metric), [*STATISTICS, *COSTS], 20)}"
                )
        self._columns = {metric: STATISTICS.index(metric) for metric in self.metrics if metric in STATISTICS}
        self._costs = tuple(metric for metric in self.metrics if metric in COSTS)
        self._collector, self._flush = Collector(), Flush()
        self._step = 0
        self._values: dict[str, deque[tuple[int, dict[str, float]]]] = {}
        self._lock = threading.RLock()
        # The method names only what is asked for: a clock before and after costs, and so do views.
        self.on_forward: Any = (
            self._both if self._columns and self._costs else self._cost if self._costs else self._statistics
        )

    # ---- while the model runs ------------------------------------------------------------------------------------

    def _statistics(self, name: str, live_output: Any, step: int) -> None:
        tensor = first_floating(live_output)
        if tensor is None:
            return
        with self._lock:
            if step != self._step and len(self._collector):
                self._send()
            self._step = step
            self._collector.add(name, tensor.detach())

    def _cost(self, name: str, seconds: float, memory: int, step: int, trainer: Any) -> None:
        measured = {"time": seconds, "memory": float(memory)}
        self._note(name, step, {metric: measured[metric] for metric in self._costs}, trainer)

    def _both(self, name: str, live_output: Any, seconds: float, memory: int, step: int, trainer: Any) -> None:
        self._statistics(name, live_output, step)
        self._cost(name, seconds, memory, step, trainer)

    def on_before_backward(self, trainer: Any) -> None:
        """The forward pass is over: read what it left, before the backward pass frees it."""
        with self._lock:
            if len(self._collector):
                self._send()
            for arrival in self._flush.ready():
                self._arrived(arrival.step, arrival.keys, arrival.rows, trainer)

    def on_train_end(self, trainer: Any) -> None:
        self._collect(trainer)

    def close(self) -> None:
        """Let go of what was gathered."""
        with self._lock:
            self._collector.discard()

    # ---- reading -------------------------------------------------------------------------------------------------

    def latest(self) -> dict[str, dict[str, float]]:
        """The newest values of every module; waits for what is still on the device."""
        self._collect(None)
        return {name: _merged(values) for name, values in self._values.items()}

    def history(self, name: str) -> list[tuple[int, dict[str, float]]]:
        """(step, values) of one module, oldest first; at most the last thousand."""
        self._collect(None)
        return list(self._values.get(name, ()))

    def running(self, name: str) -> dict[str, float]:
        """The mean over all kept values of one module."""
        rows = [values for _, values in self.history(name)]
        return {
            metric: sum(row[metric] for row in rows if metric in row) / max(sum(metric in row for row in rows), 1)
            for metric in self.metrics
        }

    # ---- from the device -----------------------------------------------------------------------------------------

    def _send(self) -> None:
        keys, rows = self._collector.finish()
        self._flush.send(self._step, [str(key) for key in keys], rows)

    def _collect(self, trainer: Any) -> None:
        with self._lock:
            if len(self._collector):
                self._send()
            for arrival in self._flush.drain():
                self._arrived(arrival.step, arrival.keys, arrival.rows, trainer)

    def _arrived(self, step: int, keys: Sequence[Any], rows: torch.Tensor, trainer: Any) -> None:
        for name, row in zip(keys, rows.tolist(), strict=True):
            self._note(name, step, {metric: row[column] for metric, column in self._columns.items()}, trainer)

    def _note(self, name: str, step: int, values: dict[str, float], trainer: Any) -> None:
        with self._lock:
            self._values.setdefault(name, deque(maxlen=KEPT)).append((step, values))
        if trainer is not None:
            for metric, value in values.items():
                trainer.log(f"activations/{name}/{metric}", value, step)


def _merged(values: deque[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """Statistics and costs are noted apart; the newest of each."""
    merged: dict[str, float] = {}
    for _, row in values:
        merged.update(row)
    return merged
