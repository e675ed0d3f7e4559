"""The tables that events are fired through: one slot per event, filled when the event first fires."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from hookline.core.costs import Cost
from hookline.core.failures import FailureHandler
from hookline.events.catalog import CATALOG, Event
from hookline.events.dispatch import Bound, Fire, Fired, compile_event
from hookline.events.schedule import Clock, Schedule
from hookline.registry.due import Agenda
from hookline.registry.guard import Guard

INNER = [event.name for event in CATALOG.values() if event.inner]
OUTER = [event.name for event in CATALOG.values() if not event.inner]
KNOWS_NORM, KNOWS_LR, KNOWS_METRICS = {"grad_norm", "ctx"}, {"lr", "ctx"}, {"metrics"}  # arguments
TABLES_KEPT = 64  # sets of due hooks whose callables are kept

Compiler = Callable[[list[Bound], bool], Fired | None]
Dresser = Callable[[Event, Sequence[Bound], bool], list[Bound]]


class Tables:
    """Callables for every event and every set of due hooks, made lazily and thrown away when the hooks change.

    An event in flight holds its own callable, so it finishes on the set of hooks it started with.
    """

    def __init__(
        self,
        listeners: Callable[[Event, frozenset[str]], list[Bound]],
        desk: FailureHandler,
        guard: Guard,
        lock: threading.RLock,
    ) -> None:
        self.fire = Fire()
        self.agenda = Agenda()
        self.countdown = 0  # micro-batches until somebody may become due, or time is sampled
        self.hearers = dict.fromkeys(CATALOG, 0)  # listeners of each event, whether due and enabled or not
        # What costs every step something is done only where somebody may ask for it: listeners of on_step_end for the
        # norm of gradients that are gone by then, or for the step's learning rate, and any for metrics to add to.
        self.norm_readers = self.lr_readers = self.metric_readers = 0
        self._listeners, self._desk, self._guard, self._lock = listeners, desk, guard, lock
        self.argument_costs: defaultdict[str, Cost] = defaultdict(Cost)
        self._tables: dict[tuple[frozenset[str], frozenset[str], bool], dict[str, Fired | None]] = {}
        self._compilers: dict[str, Compiler] = {}
        self._dressers: list[Dresser] = []

    def count(self, event: str, wanted: Collection[str], by: int) -> None:
        """Keep count of who listens to what: one listener more, or one less."""
        self.hearers[event] += by
        at_the_end = event == "on_step_end"
        self.norm_readers += by * (at_the_end and not KNOWS_NORM.isdisjoint(wanted))
        self.lr_readers += by * (at_the_end and not KNOWS_LR.isdisjoint(wanted))
        self.metric_readers += by * (not KNOWS_METRICS.isdisjoint(wanted))

    def reset(self) -> None:
        """The set of hooks is another: forget all callables; each event makes its own when it next fires."""
        self._tables = {}
        self.agenda.wait, self.countdown = max(self.agenda.wait - self.countdown, 0), 0  # what has passed, and no more
        self._install()
        for name in OUTER:
            setattr(self.fire, name, partial(self._first_fire, None, name) if self.hearers[name] else None)
        for name in INNER:  # of those that have hearers, the slots were just filled: another thread may be firing
            if not self.hearers[name]:
                setattr(self.fire, name, None)

    def _install(self) -> None:
        """Put the callables for the current set of due hooks into the slots of the inner events that have hearers."""
        key = self.agenda.decision
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) >= TABLES_KEPT:
                self._tables.clear()
            table = self._tables[key] = {}
            for name in filter(self.hearers.get, INNER):
                table[name] = partial(self._first_fire, table, name)
        for name, fired in table.items():
            setattr(self.fire, name, fired)

    def _first_fire(self, table: dict[str, Fired | None] | None, name: str, *values: Any) -> Any:
        """Stands in a slot until the event first fires, then makes way for the real callable."""
        with self._lock:
            fired = self._compile(CATALOG[name])
            if table is not None:
                table[name] = fired
            if table is None or self._tables.get(self.agenda.decision) is table:
                setattr(self.fire, name, fired)
        return fired(*values) if fired else None

    def _compile(self, event: Event) -> Fired | None:
        bound = self._guard.dress(event, self._listeners(event, self.agenda.due_for(event)))
        for dress in self._dressers:
            bound = dress(event, bound, self.agenda.timed)
        special = self._compilers.get(event.name)
        watch = self._guard.watch(event, bound)
        if special is None:
            return compile_event(event, bound, self._desk, self.argument_costs, self.agenda.timed, watch)
        fired = special(bound, self.agenda.timed)
        return fired if fired is None or watch is None else watch.streams.guard(fired, watch.drew)

    def compile(self, event: Event, bound: Sequence[Bound]) -> Fired | None:
        """The callable of one event for these listeners."""
        return compile_event(event, bound, self._desk, self.argument_costs, self.agenda.timed)

    def compile_with(self, event: str, compiler: Compiler) -> None:
        """Let another part make the callable of one event: the update chain and the forward tap do."""
        self._compilers[event] = compiler
        self.reset()

    def dress_with(self, dresser: Dresser) -> None:
        """Let another part wrap the listeners of an event before they are compiled."""
        self._dressers.append(dresser)
        self.reset()

    def has_own_compiler(self, event: str) -> bool:
        """Whether another part makes this event's callable."""
        return event in self._compilers

    def decide_who_is_due(self, clock: Clock, scheduled: Sequence[tuple[str, Schedule]], sample: bool) -> None:
        """Ask the schedules, put the callables for those who are due in place, and count down to the next question."""
        before = self.agenda.decision
        self.countdown = self.agenda.ask(clock, scheduled, sample)
        if self.agenda.decision != before:
            self._install()

    def scale(self, hook: str) -> float:
        """How many micro-batches each timed one of a hook stands for."""
        return self.agenda.scale(hook, max(self.agenda.wait - self.countdown, 0))
