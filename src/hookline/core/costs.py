"""Add up what hooks cost, by hook and by argument: host time, which dispatch.py measures, and device time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING, Any

from hookline import _device
from hookline.core.base import hook_attribute
from hookline.core.catalog import CATALOG, Event
from hookline.core.failures import Incident

if TYPE_CHECKING:
    from hookline.core.dispatch import BoundHook
    from hookline.core.entry import Entry
    from hookline.run.control import RunControl


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

    def reset(self) -> None:
        """Start counting from zero."""
        self.calls = self.ns = self.device_calls = self.device_ns = 0


# Two device events cost more than most hooks. It is a prime, because otherwise it would always fall on the same place
# in an accumulation window, or the same module.
DEVICE_TIMED_ONE_IN = 127


class DeviceTimer:
    """Time hooks on an accelerator, on some of their calls inside of steps.

    Only ``collect(wait=True)`` waits for the accelerator. Hooks may run in several threads.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[Cost, Any, Any]] = deque()  # Oldest first.
        self._collecting = threading.Lock()

    def wrap(self, event: Event, hook: BoundHook) -> BoundHook:
        """Return a listener of an event as it is called."""
        if not event.inner or not _device.is_initialized():
            return hook
        call, pending, cost = hook.call, self._pending, hook.cost

        def timed_on_device(*args: Any, **kwargs: Any) -> Any:
            # The first call is timed: a hook that is due once a run would otherwise have no time on the device.
            if cost.calls % DEVICE_TIMED_ONE_IN or _device.is_capturing():
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
                # The time that the events themselves take does not belong to the hook.
                spent = called - entered + perf_counter_ns() - returned
                cost.ns -= spent

        return hook.with_call(timed_on_device)

    def collect(self, wait: bool = False) -> None:
        """Add the times of finished device work to the costs; with `wait`, of all work.

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


WORTH_LISTING_NS, FREE_NS = 100_000, 2_000  # In total, and per call: reading a free argument is not worth a row.


def cost_table(entries: Iterable[Entry], arguments: Mapping[str, Cost]) -> list[dict[str, Any]]:
    """Return a row for each hook and for each argument that is worth listing, the most expensive first.

    Calls and seconds are exact: every call is timed on the host. The time on the device is estimated from some calls.

    Args:
        entries: The hooks.
        arguments: The cost of each argument.
    """
    rows = []
    for entry in entries:
        costs = entry.costs.values()
        row = {
            "hook": entry.name,
            "kind": "+".join(entry.kinds),
            "calls": sum(cost.calls for cost in costs),
            "seconds": sum(cost.ns for cost in costs) / 1e9,
        }
        on_device = sum(cost.device_ns * cost.calls / cost.device_calls for cost in costs if cost.device_calls) / 1e9
        rows.append(row | ({"device_seconds": on_device} if on_device else {}))
    rows += [
        {"hook": f"reading {name}", "kind": "argument", "calls": cost.calls, "seconds": cost.ns / 1e9}
        for name, cost in list(arguments.items())
        if cost.ns > max(WORTH_LISTING_NS, FREE_NS * cost.calls)
    ]
    return sorted(rows, key=lambda row: -float(str(row["seconds"])))


def share_of_run(seconds: float, run_seconds: float) -> float:
    """Return the share of a run's time that a hook took; at most 1, though several threads may have called it."""
    return min(seconds / run_seconds, 1.0) if run_seconds > 0 else 0.0


ENOUGH_CALLS = 3  # Outside of steps, fewer may be calls that happen once per run.
WARM_UP_SECONDS = 5.0  # Nothing is reported earlier, because the first steps pay for warming up.


class CostMonitor:
    """Report once, during a run, each hook that takes more than a given share of the run's time; None reports none."""

    def __init__(self, run: RunControl, limit: float | None) -> None:
        self._run, self._limit = run, limit
        self._began, self._before = perf_counter(), {entry.name: _spent(entry) for entry in run.hooks.entries()}
        self._reported: set[str] = set()

    def check(self) -> None:
        """Report the hooks that are above the limit and were not reported yet."""
        elapsed = perf_counter() - self._began
        if self._limit is None or elapsed < WARM_UP_SECONDS:
            return
        for entry in self._run.hooks.entries():
            before = self._before.get(entry.name, (0.0, 0.0, 0))
            inner, outer, calls = (now - then for now, then in zip(_spent(entry), before, strict=True))
            if calls < ENOUGH_CALLS:
                outer = 0.0
            share = share_of_run(inner + outer, elapsed)
            if share <= self._limit or entry.name in self._reported:
                continue
            self._reported.add(entry.name)
            if entry.intervenes or (entry.built_in and hook_attribute(entry.hook, "shows_progress")):
                continue  # Such a hook is part of training, or the console, and runs as often as it must.
            if outer > inner:
                remedy = "most of it outside of steps: do less work there"
            elif entry.schedule.always:
                remedy = "give it a schedule, such as every=10, or read fewer values"
            else:
                remedy = "give it a longer period, or read fewer values"
            message = f"takes {share:.1%} of the run's time (limit {self._limit:.0%}); {remedy}"
            incident = Incident("costly", entry.name, "all events", self._run.step, message)
            self._run.hooks.failures.report(incident, True)


def _spent(entry: Entry) -> tuple[float, float, int]:
    """Return a hook's host time inside and outside of steps, and the number of calls outside."""
    outside = [cost for event, cost in entry.costs.items() if not CATALOG[event].inner]
    return entry.inner_seconds, sum(cost.ns for cost in outside) / 1e9, sum(cost.calls for cost in outside)
