"""Which scheduled hooks are due at a micro-batch, asked only when the answer may have changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from time import monotonic
from typing import Any

from hookline.events.catalog import Event
from hookline.events.schedule import FAR, Clock, Reading, Schedule

SAMPLE_EVERY = 17  # inner events are timed on one micro-batch in so many: a prime, or it would always meet the same
SAMPLE_AT = 8  # place of an accumulation window; and not on the first, which pays for warming up
TIMED_OF_DUE = 4  # a hook that is due now and then is timed one time in so many, from the first on


class Agenda:
    """Counts down to the next micro-batch at which a schedule must be asked, or time be sampled."""

    def __init__(self) -> None:
        self.due: frozenset[str] = frozenset()  # at this micro-batch
        self.due_at_step: frozenset[str] = frozenset()  # at one of this step's micro-batches so far
        self.timed = False
        self.wait = 0  # for how many micro-batches the last decision held
        self._asked_at: int | None = None
        self._batches = 0  # micro-batches up to the last question
        self._sampled = 0  # of these, timed
        self._asked: Sequence[tuple[str, Schedule]] = ()
        self._groups: list[tuple[Schedule, list[str]]] = []  # those asked, by schedule
        self._compares = False  # some ask where the last micro-batch was
        self._window: tuple[int, int] | None = None  # step and epoch that were asked about last
        self._turns: dict[str, int] = {}  # how often a scheduled hook has become due
        self._timed_step: int | None = None
        self._due_batches: dict[str, int] = {}  # per scheduled hook
        self._due_sampled: dict[str, int] = {}
        self._before: Reading | None = Reading()  # where the last micro-batch was; None when nobody looked

    def resume(self, clock: Clock) -> None:
        """Count from here: the counters were restored."""
        self._before, self._asked_at = Reading.of(clock), None

    def forget_step(self) -> None:
        """The next micro-batch is a step's first, though the step may have the number of one that was left."""
        self._window = None

    def forget(self, hook: str) -> None:
        """It is gone, and another may take its name."""
        self.due, self.due_at_step = self.due - {hook}, self.due_at_step - {hook}

    def due_for(self, event: Event) -> frozenset[str]:
        """Whoever came due within a step's window hears the step, too: its events come only when the window ends."""
        return self.due_at_step if event.of_step else self.due

    @property
    def decision(self) -> tuple[frozenset[str], frozenset[str], bool]:
        """All that the callables of events depend on."""
        return self.due, self.due_at_step, self.timed

    def ask(self, now: Clock, scheduled: Sequence[tuple[str, Schedule]], sample: bool) -> int:
        """Decide who is due now; returns for how many further micro-batches the decision holds."""
        if scheduled is not self._asked:
            self._asked, self._groups = scheduled, _by_schedule(scheduled)
            self._compares = any(schedule.by_tokens_or_time for schedule, _ in self._groups)
        before, last = self.due_at_step, self._last_batch(now)
        window = now.steps, now.epochs
        earlier = before if self._window == window else frozenset()
        self.due = frozenset([name for group in self._groups for name in self._due_of(*group, now, last, earlier)])
        self.due_at_step, self._window = earlier | self.due if earlier else self.due, window
        if self._shall_be_timed(self.due_at_step - before):
            self._timed_step = now.steps  # to its end: the first micro-batch of a window has few of its events
        self.timed = (sample and now.batches % SAMPLE_EVERY == SAMPLE_AT) or self._timed_step == now.steps
        self._count(now)
        waits = [0] if self.due_at_step or self.timed else [schedule.wait(now) for schedule, _ in self._groups]
        wait = min(*waits, (SAMPLE_AT - now.batches - 1) % SAMPLE_EVERY if sample else FAR, FAR)
        self._before = Reading.of(now) if self._compares and not wait else None
        self.wait = wait
        return wait

    def _shall_be_timed(self, newly_due: Collection[str]) -> bool:
        """One that is rarely due might never be so when all are sampled."""
        turns = [self._turns.get(name, 0) for name in newly_due]
        self._turns.update(zip(newly_due, [turn + 1 for turn in turns], strict=True))
        return any(turn % TIMED_OF_DUE == 0 for turn in turns)

    def _due_of(
        self, schedule: Schedule, names: list[str], now: Clock, last: Clock, earlier: frozenset[str]
    ) -> list[str]:
        """Whoever is due by tokens or time in the middle of a window hears the rest of its micro-batches."""
        if schedule.due(now, last):
            return names
        return [name for name in names if name in earlier] if earlier and schedule.by_tokens_or_time else []

    def _last_batch(self, now: Clock) -> Clock:
        """Where the micro-batch before this one was; what was passed while nobody looked is past."""
        if self._before is None or (self._before.batches == 0 and now.batches > 1):
            return now
        return self._before

    def _count(self, now: Clock) -> None:
        self._batches += 1 if self._asked_at is None else max(now.batches - self._asked_at, 1)
        self._asked_at = now.batches
        self._sampled += self.timed
        for name in self.due_at_step:
            self._due_batches[name] = self._due_batches.get(name, 0) + 1
            self._due_sampled[name] = self._due_sampled.get(name, 0) + self.timed

    def scale(self, name: str, since: int) -> float:
        """How many micro-batches each timed one of a hook stands for, `since` the last question."""
        if name in self._due_batches:
            return self._due_batches[name] / max(self._due_sampled[name], 1)
        return (self._batches + since) / self._sampled if self._sampled else 1.0


def _by_schedule(scheduled: Sequence[tuple[str, Schedule]]) -> list[tuple[Schedule, list[str]]]:
    """Mostly several hooks have one schedule, which need be asked only once."""
    groups: dict[Schedule, list[str]] = {}
    for name, schedule in scheduled:
        groups.setdefault(schedule, []).append(name)
    return list(groups.items())


class HandClock:
    """Tells from the values of events fired by hand where that loop is; what an event does not say stays as it was."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()  # micro-batches by loader
        self.now = Reading(by_loader=self._seen)
        self._born = monotonic()
        self._position: tuple[int, int, int, str] | None = None

    def read(self, values: Mapping[str, Any]) -> None:
        """Take over what an event says about where the loop is."""
        said = {name: value for name, value in values.items() if isinstance(value, int)}
        now, batch = self.now, said["batch_idx"] + 1 if "batch_idx" in said else None
        now.steps = said.get("step", now.steps if batch is None else batch)
        now.batches = now.steps if batch is None else batch
        now.epochs = said["epoch"] + 1 if "epoch" in said else max(now.epochs, 1)
        now.tokens = said.get("tokens_seen", now.tokens)
        now.seconds = monotonic() - self._born
        now.loader = str(values.get("dataloader_name", now.loader))

    def moved(self) -> bool:
        """Whether another micro-batch has begun since this was last asked, so that the schedules must be."""
        before, self._position = self._position, (self.now.steps, self.now.batches, self.now.epochs, self.now.loader)
        if self._position != before and self.now.loader:
            self._seen[self.now.loader] += 1
        return self._position != before
