"""What hooks cost on the device: events of the device's own clock around their calls, now and then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from hookline.events.catalog import Event
from hookline.events.dispatch import Bound, Cost


class DeviceTime:
    """Times hooks on a CUDA device on the batches whose host time is sampled, too. Nothing waits before `collect`."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Cost, Any, Any]] = []

    def dress(self, event: Event, bound: Sequence[Bound], timed: bool) -> list[Bound]:
        """The listeners as they shall be called."""
        if not timed or not event.inner or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return list(bound)
        return [replace(item, listener=replace(item.listener, call=self._around(item))) for item in bound]

    def _around(self, item: Bound) -> Callable[..., Any]:
        call, waiting, cost = item.listener.call, self._waiting, item.cost

        def on_the_clock(*arguments: Any, **named: Any) -> Any:
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            began.record()
            try:
                return call(*arguments, **named)
            finally:
                ended.record()
                waiting.append((cost, began, ended))

        return on_the_clock

    def collect(self, wait: bool = False) -> None:
        """Add to the accounts what the device has finished; with `wait`, everything."""
        left = []
        for cost, began, ended in self._waiting:
            if wait:
                ended.synchronize()
            if ended.query():
                cost.device_ns += round(began.elapsed_time(ended) * 1e6)
            else:
                left.append((cost, began, ended))
        self._waiting[:] = left
