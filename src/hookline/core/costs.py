"""Measure what hooks cost: time by hook and by argument, on the host and on the device."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING, Any

from hookline import _device
from hookline.core.catalog import Event
from hookline.core.failures import Incident

if TYPE_CHECKING:
    from hookline.core.dispatch import BoundHook
    from hookline.core.entry import Entry
    from hookline.core.run_control import RunControl


@dataclass(slots=True)
class Cost:
    """Add up the time of one hook or one argument, on the host and on the device."""

    calls: int = 0
    ns: int = 0
    device_calls: int = 0  # Only some of the calls are timed on the device, too.
    device_ns: int = 0

    def add(self, ns: int) -> None:
        """Count one call."""
        self.calls += 1
        self.ns += ns


DEVICE_TIMED_ONE_IN = 8  # Of the calls whose host time is sampled: two device events cost more than most hooks.


class DeviceTimer:
    """Time hooks on an accelerator, on some of the calls whose host time is sampled.

    Nothing waits for the accelerator but ``collect(wait=True)``. Hooks may run in several threads.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[Cost, Any, Any]] = deque()  # Oldest first.
        self._collecting = threading.Lock()

    def wrap(self, event: Event, hooks: Sequence[BoundHook], timed: bool) -> list[BoundHook]:
        """Return the listeners of an event as they are called when it is timed."""
        if not timed or not event.inner or not _device.is_initialized():
            return list(hooks)
        return [hook.with_call(self._wrapped(hook)) for hook in hooks]

    def _wrapped(self, hook: BoundHook) -> Callable[..., Any]:
        call, pending, cost, calls = hook.listener.call, self._pending, hook.cost, count()

        def timed_on_device(*args: Any, **kwargs: Any) -> Any:
            # The first call is timed: a hook that is due once a run would otherwise have no time on the device.
            if next(calls) % DEVICE_TIMED_ONE_IN or _device.is_capturing():
                return call(*args, **kwargs)
            entered = perf_counter_ns()
            self.collect()  # Otherwise a long run would keep the events of all its steps.
            began, ended = _device.timing_event(), _device.timing_event()
            began.record()
            called = perf_counter_ns()
            try:
                return call(*args, **kwargs)
            finally:
                returned = perf_counter_ns()
                ended.record()
                pending.append((cost, began, ended))
                # The time that the events take is not the hook's.
                cost.ns -= called - entered + perf_counter_ns() - returned

        return timed_on_device

    def collect(self, wait: bool = False) -> None:
        """Add what the device has finished to the costs; with `wait`, everything.

        Does nothing while the current stream is captured into a graph, which must not be interrupted by queries.
        """
        # If another thread is collecting, a hook need not wait for it. Appending to the deque needs no lock.
        if _device.is_capturing() or not self._collecting.acquire(blocking=wait):
            return
        try:
            while self._pending:
                cost, began, ended = self._pending[0]
                if wait:
                    ended.synchronize()
                elif not ended.query():
                    break  # Those after it have rarely finished; a later call finds them.
                self._pending.popleft()
                cost.device_calls += 1
                cost.device_ns += round(began.elapsed_time(ended) * 1e6)
        finally:
            self._collecting.release()


BatchesPerSample = Callable[[str], float]
"""Returns, by a hook's name, how many micro-batches each of its timed ones stands for."""
WORTH_LISTING_NS = 100_000  # Reading a free argument is not worth a row.


def cost_table(
    entries: Iterable[Entry], arguments: Mapping[str, Cost], scale: BatchesPerSample
) -> list[dict[str, Any]]:
    """Return a row for each hook and for each argument that is worth listing, most expensive first.

    Args:
        entries: The hooks.
        arguments: The cost of each argument.
        scale: Scales sampled figures up.
    """
    rows = []
    for entry in entries:
        if entry.only_runs_timed:
            continue
        inner, outer, times = entry.inner_cost, entry.outer_cost, scale(entry.name)
        row = {
            "hook": entry.name,
            "kind": "+".join(entry.kinds),
            "calls": round(inner.calls * times) + outer.calls,
            "seconds": (inner.ns * times + outer.ns) / 1e9,
        }
        # The device time of all calls is estimated from those that were timed.
        on_device = inner.device_ns * inner.calls / max(inner.device_calls, 1) * times / 1e9
        rows.append(row | ({"device_seconds": on_device} if on_device else {}))
    rows += [
        {"hook": f"reading {name}", "kind": "argument", "calls": cost.calls, "seconds": cost.ns / 1e9}
        for name, cost in list(arguments.items())
        if cost.ns > WORTH_LISTING_NS
    ]
    return sorted(rows, key=lambda row: -float(str(row["seconds"])))


SAMPLING_ERROR = 0.1  # A hook that takes nearly all of a run may seem to take this much more.


def share_of_run(seconds: float, run_seconds: float) -> float | None:
    """Return the share of a run's time that a hook took, at most 1; None if there are too few samples to tell.

    A hook's time is scaled up from a few calls. If that is longer than the run, those calls stand for no others, as
    in a run of a few steps, one of which is timed.
    """
    share = seconds / run_seconds if run_seconds > 0 else 0.0
    return min(share, 1.0) if share <= 1 + SAMPLING_ERROR else None


ENOUGH_CALLS = 3  # Timed calls that are not all exceptional.
WARM_UP_SECONDS = 5.0  # Nothing is reported earlier, because the first steps pay for warming up.


class CostMonitor:
    """Report once, during a run, each hook that takes more than a given share of the run's time; None reports none."""

    def __init__(self, run: RunControl, limit: float | None) -> None:
        self._run, self._limit = run, limit
        self._began, self._before = perf_counter(), self._costs()
        self._reported: set[str] = set()

    def check(self) -> None:
        """Report the hooks that are above the limit and were not reported yet."""
        elapsed = perf_counter() - self._began
        if self._limit is None or elapsed < WARM_UP_SECONDS:
            return
        hooks = self._run.hooks
        for name, (inner, outer, calls) in self._costs().items():
            entry = hooks.entry(name)
            before = self._before.get(name, (0.0, 0.0, 0))
            # Outside of steps, a single call may be one that comes once a run.
            inner, outer = inner - before[0], outer - before[1] if calls - before[2] >= ENOUGH_CALLS else 0.0
            share = share_of_run(inner + outer, elapsed)
            if share is None and entry.inner_cost.calls >= ENOUGH_CALLS:
                share = 1.0
            if share is None or share <= self._limit or name in self._reported:
                continue
            self._reported.add(name)
            if entry.intervenes:
                continue  # It is part of training, and works as often as it must.
            if outer > inner:
                remedy = "most of it outside of steps: do less in it"
            elif entry.schedule.always:
                remedy = "give it a schedule, such as every=10, or read fewer values"
            else:
                remedy = "give it a longer period, or read fewer values"
            message = f"takes {share:.0%} of the run's time (limit {self._limit:.0%}); {remedy}"
            hooks.failures.report(Incident("costly", name, "all events", self._run.step, message), True)

    def _costs(self) -> dict[str, tuple[float, float, int]]:
        """Return the host time of each hook inside and outside of steps, and the number of calls outside."""
        inner = self._run.hooks.inner_seconds()
        outer = {name: self._run.hooks.entry(name).outer_cost for name in inner}
        return {name: (seconds, outer[name].ns / 1e9, outer[name].calls) for name, seconds in inner.items()}
