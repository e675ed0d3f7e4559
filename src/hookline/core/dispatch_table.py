"""The callables of all events for every set of due hooks, made when an event first fires."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from hookline.core.catalog import CATALOG, Event
from hookline.core.costs import Cost
from hookline.core.dispatch import BoundHook, Dispatch, EventSlots, compile_event
from hookline.core.failures import FailureHandler
from hookline.core.rng_guard import RngGuard
from hookline.core.schedule import Clock, Schedule
from hookline.core.scheduler import Scheduler

INNER = [event.name for event in CATALOG.values() if event.inner]
OUTER = [event.name for event in CATALOG.values() if not event.inner]
LEADS_TO_NORM, LEADS_TO_LR, LEADS_TO_METRICS = {"grad_norm", "ctx"}, {"lr", "ctx"}, {"metrics"}
BETWEEN_UPDATE_AND_CLEAR = ("on_before_optimizer_step", "on_after_optimizer_step", "on_step_skipped")
MAX_TABLES = 64  # Sets of due hooks whose callables are stored.

Compiler = Callable[[list[BoundHook], bool], Dispatch | None]
"""Makes the callable of an event from its listeners, and whether they are timed."""
Wrapper = Callable[[Event, Sequence[BoundHook], bool], list[BoundHook]]
"""Returns the listeners of an event as they are called, given whether they are timed."""


class DispatchTable:
    """Fills the slots of events for the hooks that are due; everything is made again when the hooks change.

    An event in progress holds its callable, so that it finishes with the hooks it started with.
    """

    def __init__(
        self,
        listeners: Callable[[Event, frozenset[str]], list[BoundHook]],
        failures: FailureHandler,
        rng_guard: RngGuard,
        lock: threading.RLock,
    ) -> None:
        self.slots = EventSlots()
        self.scheduler = Scheduler()
        self.countdown = 0
        """Micro-batches until a hook may become due or time is sampled."""
        self.listener_counts = dict.fromkeys(CATALOG, 0)
        """Listeners of each event, whether due and enabled or not."""
        self.argument_costs: defaultdict[str, Cost] = defaultdict(Cost)
        # Some values cost every step something, and are computed only if a listener may read them: at on_step_end the
        # norm of gradients that are gone by then and the step's learning rate, anywhere metrics that hooks add to.
        self.norm_readers = self.lr_readers = self.metric_readers = 0
        self.gradient_writers = 0
        """User listeners between the update chain and zero_grad, which may clear or replace gradients."""
        self._listeners, self._failures, self._rng_guard, self._lock = listeners, failures, rng_guard, lock
        self._tables: dict[tuple[frozenset[str], frozenset[str], bool], dict[str, Dispatch | None]] = {}
        self._compilers: dict[str, Compiler] = {}
        self._wrappers: list[Wrapper] = []

    def count(self, event: str, wanted: Collection[str], built_in: bool, by: int) -> None:
        """Count a listener that was added (1) or removed (-1), and what it may read or write."""
        self.listener_counts[event] += by
        at_step_end = event == "on_step_end"
        self.norm_readers += by * (at_step_end and not LEADS_TO_NORM.isdisjoint(wanted))
        self.lr_readers += by * (at_step_end and not LEADS_TO_LR.isdisjoint(wanted))
        self.metric_readers += by * (not LEADS_TO_METRICS.isdisjoint(wanted))
        self.gradient_writers += by * (not built_in and event in BETWEEN_UPDATE_AND_CLEAR)

    def reset(self) -> None:
        """Forget all callables, because the hooks have changed; each event makes its own when it next fires."""
        self._tables = {}
        scheduler = self.scheduler
        scheduler.wait, self.countdown = max(scheduler.wait - self.countdown, 0), 0  # Only what has passed counts.
        self._install()
        for name in OUTER:
            has_listeners = self.listener_counts[name]
            setattr(self.slots, name, partial(self._first_dispatch, None, name) if has_listeners else None)
        # The slots of inner events with listeners were just filled: another thread may be firing them.
        for name in INNER:
            if not self.listener_counts[name]:
                setattr(self.slots, name, None)

    def _install(self) -> None:
        """Put the callables for the current decision into the slots of the inner events that have listeners."""
        key = self.scheduler.decision
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) >= MAX_TABLES:
                self._tables.clear()
            table = self._tables[key] = {}
            for name in filter(self.listener_counts.get, INNER):
                table[name] = partial(self._first_dispatch, table, name)
        for name, dispatch in table.items():
            setattr(self.slots, name, dispatch)

    def _first_dispatch(self, table: dict[str, Dispatch | None] | None, name: str, *values: Any) -> Any:
        """Occupy a slot until the event first fires, then make the real callable and call it."""
        with self._lock:
            dispatch = self._compile(CATALOG[name])
            if table is not None:
                table[name] = dispatch
            if table is None or self._tables.get(self.scheduler.decision) is table:
                setattr(self.slots, name, dispatch)
        return dispatch(*values) if dispatch else None

    def _compile(self, event: Event) -> Dispatch | None:
        timed = self.scheduler.timed
        hooks = self._rng_guard.wrap(event, self._listeners(event, self.scheduler.due_for(event)))
        for wrap in self._wrappers:
            hooks = wrap(event, hooks, timed)
        compiler = self._compilers.get(event.name)
        dispatch = self.compile(event, hooks) if compiler is None else compiler(hooks, timed)
        return self._rng_guard.around(event, hooks, dispatch)

    def compile(self, event: Event, hooks: Sequence[BoundHook]) -> Dispatch | None:
        """Make the callable of one event for given listeners."""
        return compile_event(event, hooks, self._failures, self.argument_costs, self.scheduler.timed)

    def compile_with(self, event: str, compiler: Compiler) -> None:
        """Let another part make the callable of one event, as the update chain and the forward hooks do."""
        self._compilers[event] = compiler
        self.reset()

    def has_own_compiler(self, event: str) -> bool:
        """Return whether another part makes the event's callable."""
        return event in self._compilers

    def add_wrapper(self, wrapper: Wrapper) -> None:
        """Let another part wrap the listeners of events before they are compiled."""
        self._wrappers.append(wrapper)
        self.reset()

    def decide_due_hooks(self, clock: Clock, scheduled: Sequence[tuple[str, Schedule]], sample: bool) -> None:
        """Evaluate the schedules and install the callables for the hooks that are due; `Scheduler.decide` has Args."""
        before = self.scheduler.decision
        self.countdown = self.scheduler.decide(clock, scheduled, sample)
        if self.scheduler.decision != before:
            self._install()

    def scale(self, hook: str) -> float:
        """Return how many micro-batches each timed one of a hook stands for."""
        return self.scheduler.scale(hook, max(self.scheduler.wait - self.countdown, 0))
