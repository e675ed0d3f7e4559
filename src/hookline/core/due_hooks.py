"""Decide which scheduled hooks are due at a micro-batch; schedules are evaluated only when the answer may change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from hookline.core.catalog import CATALOG, Event
from hookline.core.schedule import FAR, Clock, Reading, Schedule

if TYPE_CHECKING:
    from hookline.core.entry import Entry

# Inner events are timed on one micro-batch in 17: a prime, or it would always meet the same place of an accumulation
# window. Not on the first, which pays for warming up.
SAMPLE_EVERY = 17
SAMPLE_AT = 8
TIMED_OF_DUE = 4  # A scheduled hook is timed one time in four that it is due, from the first on.


class Decision(NamedTuple):
    """Everything that the callables of events depend on."""

    due: frozenset[str] = frozenset()
    """Scheduled hooks that are due at this micro-batch."""
    due_at_step: frozenset[str] = frozenset()
    """Scheduled hooks that are due at one of this step's micro-batches so far."""
    timed: bool = False
    """Whether hooks are timed at this micro-batch."""
    sampled: bool = False
    """Whether some micro-batches are timed for all, as in a trainer's run; else every call is timed."""

    def due_for(self, event: Event) -> frozenset[str]:
        """Return the scheduled hooks that are called at an event.

        A hook that came due within a step's window is called at the step's events, which come when the window ends.
        """
        return self.due_at_step if event.of_step else self.due


class Scheduler:
    """Counts down to the next micro-batch at which a schedule must be evaluated or time is sampled."""

    def __init__(self) -> None:
        self.decision = Decision(timed=True)  # Until a run begins.
        self.countdown = 0
        """Micro-batches until a hook may become due or time is sampled."""
        self._wait = 0  # What the countdown started from.
        self.groups: dict[Schedule, list[str]] | None = None
        """Hooks that are not always due, by schedule; None if the hooks have changed since the last decision."""
        self._sample = False  # A hook that is always due has an inner event to be timed at.
        self._needs_previous = False  # A schedule by tokens or time compares with the previous micro-batch.
        self._previous: Reading | None = Reading()  # None if no schedule was evaluated at the previous micro-batch.
        self._window: tuple[int, int] | None = None  # Step and epoch of the last decision.
        self._timed_step: int | None = None
        self._decided_at: int | None = None
        self._batches = self._timed_batches = 0  # Up to the last decision.
        self._times_due: Counter[str] = Counter()
        self._due_batches: Counter[str] = Counter()
        self._timed_due_batches: Counter[str] = Counter()

    def evaluate_next(self, hooks_changed: bool = False) -> None:
        """Evaluate the schedules at the next micro-batch; all of them are read again if the hooks have changed."""
        self._wait, self.countdown = self._wait - self.countdown, 0  # Only what has passed is counted.
        if hooks_changed:
            self.groups = None

    def replan(self, restored: Clock | None) -> None:
        """Evaluate every schedule at the next micro-batch: an epoch began, or counters were `restored`."""
        if restored is not None:
            self._previous, self._decided_at = Reading.of(restored), None
        self._window = None  # A step begins with it, even if it has the number of one that was abandoned.
        self.evaluate_next()

    def forget(self, hook: str) -> None:
        """Forget a removed hook, because another may take its name."""
        decision = self.decision
        self.decision = decision._replace(due=decision.due - {hook}, due_at_step=decision.due_at_step - {hook})

    def decide(self, now: Clock, entries: Iterable[Entry], sampled: bool = True) -> None:
        """Decide which of the registry's hooks are due now, and for how many further micro-batches that holds.

        Args:
            now: Where the loop is.
            entries: The hooks.
            sampled: Whether hooks are timed on some micro-batches only; else on all.
        """
        groups = self._plan(entries) if self.groups is None else self.groups
        earlier_due, window = self.decision.due_at_step, (now.steps, now.epochs)
        in_window = earlier_due if self._window == window else frozenset()
        previous: Clock | None = self._previous
        if previous is None or (previous.batches == 0 and now.batches > 1):
            previous = now  # What was passed while no schedule was evaluated is past.
        names: list[str] = []
        for schedule, group in groups.items():
            if schedule.due(now, previous):
                names += group
            elif in_window and schedule.by_tokens_or_time:
                # Due by tokens or time in the middle of a window, a hook is called at the rest of its micro-batches.
                names += [name for name in group if name in in_window]
        due = frozenset(names)
        due_at_step, self._window = in_window | due if in_window else due, window
        newly_due = due_at_step - earlier_due
        if any(self._times_due[name] % TIMED_OF_DUE == 0 for name in newly_due):
            # Rarely scheduled hooks would otherwise never fall on a sampled micro-batch. They are timed to the end of
            # the step, because the first micro-batch of a window has few of its events.
            self._timed_step = now.steps
        timed = (self._sample and now.batches % SAMPLE_EVERY == SAMPLE_AT) or self._timed_step == now.steps
        if not sampled:
            self.decision = Decision(due, due_at_step, True, sampled)
            self._previous = Reading.of(now) if self._needs_previous else None
            return
        self.decision = Decision(due, due_at_step, timed, sampled)
        self._times_due.update(newly_due)
        self._due_batches.update(due_at_step)
        self._timed_due_batches.update(due_at_step if timed else ())
        self._timed_batches += timed
        self._batches += 1 if self._decided_at is None else max(now.batches - self._decided_at, 1)
        self._decided_at = now.batches
        waits = [0] if due_at_step or timed else [schedule.wait(now) for schedule in groups]
        self._wait = min(*waits, (SAMPLE_AT - now.batches - 1) % SAMPLE_EVERY if self._sample else FAR, FAR)
        self.countdown = self._wait
        self._previous = Reading.of(now) if self._needs_previous and not self._wait else None

    def _plan(self, entries: Iterable[Entry]) -> dict[Schedule, list[str]]:
        """Group hooks by schedule: usually several share one, which is evaluated only once."""
        groups: dict[Schedule, list[str]] = {}
        self._sample = False
        for entry in entries:
            if entry.enabled_for_ranks and not entry.schedule.always:
                groups.setdefault(entry.schedule, []).append(entry.name)
            elif entry.enabled_for_ranks and not self._sample:
                self._sample = any(CATALOG[event].inner for event in entry.listeners)
        self._needs_previous = any(schedule.by_tokens_or_time for schedule in groups)
        self.groups = groups
        return groups

    def scale(self, hook: str) -> float:
        """Return how many micro-batches each timed one of a hook stands for."""
        if hook in self._due_batches:
            return self._due_batches[hook] / max(self._timed_due_batches[hook], 1)
        since = self._wait - self.countdown  # After the last decision.
        return (self._batches + since) / self._timed_batches if self._timed_batches else 1.0
