"""What hooks cost on the device: events of the device's own clock around their calls, now and then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from time import perf_counter_ns
from typing import Any

import torch

from hookline.events.catalog import Event
from hookline.events.dispatch import Bound, Cost

ONE_IN = 8  # of the batches whose host time is sampled: two events of the device's clock cost more than most hooks


class DeviceTime:
    """Times hooks on a CUDA device, on some batches whose host time is sampled. Nothing waits before `collect`."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Cost, Any, Any]] = []

    def dress(self, event: Event, bound: Sequence[Bound], timed: bool) -> list[Bound]:
        """The listeners as they shall be called."""
        if not timed or not event.inner or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return list(bound)
        return [replace(item, listener=replace(item.listener, call=self._around(item))) for item in bound]

    def _around(self, item: Bound) -> Callable[..., Any]:
        call, waiting, cost, calls = item.listener.call, self._waiting, item.cost, count()

        def on_the_clock(*arguments: Any, **named: Any) -> Any:
            if next(calls) % ONE_IN:
                return call(*arguments, **named)
            entered = perf_counter_ns()
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            began.record()
            called = perf_counter_ns()
            try:
                return call(*arguments, **named)
            finally:
                returned = perf_counter_ns()
                ended.record()
                waiting.append((cost, began, ended))
                cost.ns -= called - entered + perf_counter_ns() - returned  # the clock's own time is not the hook's

        return on_the_clock

    def collect(self, wait: bool = False) -> None:
        """Add to the accounts what the device has finished; with `wait`, everything."""
        left = []
        for cost, began, ended in self._waiting:
            if wait:
                ended.synchronize()
            if ended.query():
                cost.add_on_device(round(began.elapsed_time(ended) * 1e6))
            else:
                left.append((cost, began, ended))
        self._waiting[:] = left
