"""Decide which scheduled hooks are due at a micro-batch; schedules are evaluated only when the answer may change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from time import monotonic
from typing import Any

from hookline.core.catalog import Event
from hookline.core.schedule import FAR, Clock, Reading, Schedule

# Inner events are timed on one micro-batch in 17: a prime, or it would always meet the same place of an accumulation
# window. Not on the first, which pays for warming up.
SAMPLE_EVERY = 17
SAMPLE_AT = 8
TIMED_OF_DUE = 4  # A scheduled hook is timed one time in four that it is due, from the first on.


class Scheduler:
    """Counts down to the next micro-batch at which a schedule must be evaluated or time is sampled."""

    def __init__(self) -> None:
        self.due: frozenset[str] = frozenset()
        """Scheduled hooks that are due at this micro-batch."""
        self.due_at_step: frozenset[str] = frozenset()
        """Scheduled hooks that are due at one of this step's micro-batches so far."""
        self.timed = False
        """Whether hooks are timed at this micro-batch."""
        self.wait = 0
        """For how many micro-batches the last decision held."""
        self._scheduled: Sequence[tuple[str, Schedule]] = ()
        self._groups: list[tuple[Schedule, list[str]]] = []
        self._needs_previous = False  # A schedule by tokens or time compares with the previous micro-batch.
        self._previous: Reading | None = Reading()  # None if no schedule was evaluated at the previous micro-batch.
        self._window: tuple[int, int] | None = None  # Step and epoch of the last decision.
        self._timed_step: int | None = None
        self._decided_at: int | None = None
        self._batches = self._timed_batches = 0  # Up to the last decision.
        self._times_due: dict[str, int] = {}
        self._due_batches: dict[str, int] = {}
        self._timed_due_batches: dict[str, int] = {}

    def resume(self, clock: Clock) -> None:
        """Continue from restored counters."""
        self._previous, self._decided_at = Reading.of(clock), None

    def forget_step(self) -> None:
        """Treat the next micro-batch as the first of a step, even if the step has the number of an abandoned one."""
        self._window = None

    def forget(self, hook: str) -> None:
        """Forget a removed hook, because another may take its name."""
        self.due, self.due_at_step = self.due - {hook}, self.due_at_step - {hook}

    def due_for(self, event: Event) -> frozenset[str]:
        """Return the scheduled hooks that are called at an event.

        A hook that came due within a step's window is called at the step's events, which come when the window ends.
        """
        return self.due_at_step if event.of_step else self.due

    @property
    def decision(self) -> tuple[frozenset[str], frozenset[str], bool]:
        """Everything that the callables of events depend on."""
        return self.due, self.due_at_step, self.timed

    def decide(self, now: Clock, scheduled: Sequence[tuple[str, Schedule]], sample: bool) -> int:
        """Decide which hooks are due now.

        Args:
            now: Where the run is.
            scheduled: Names and schedules of the hooks that are not always due.
            sample: Whether there are hooks that are always due, which are timed on sampled micro-batches.

        Returns:
            For how many further micro-batches the decision holds.
        """
        if scheduled is not self._scheduled:
            self._group(scheduled)
        earlier_due = self.due_at_step
        window = now.steps, now.epochs
        in_window = earlier_due if self._window == window else frozenset()
        previous: Clock | None = self._previous
        if previous is None or (previous.batches == 0 and now.batches > 1):
            previous = now  # What was passed while no schedule was evaluated is past.
        due: list[str] = []
        for schedule, names in self._groups:
            if schedule.due(now, previous):
                due += names
            elif in_window and schedule.by_tokens_or_time:
                # Due by tokens or time in the middle of a window, a hook is called at the rest of its micro-batches.
                due += [name for name in names if name in in_window]
        self.due = frozenset(due)
        self.due_at_step, self._window = in_window | self.due if in_window else self.due, window
        if self._count_due(self.due_at_step - earlier_due):
            self._timed_step = now.steps  # To its end: the first micro-batch of a window has few of its events.
        self.timed = (sample and now.batches % SAMPLE_EVERY == SAMPLE_AT) or self._timed_step == now.steps
        self._count_batches(now)
        waits = [0] if self.due_at_step or self.timed else [schedule.wait(now) for schedule, _ in self._groups]
        self.wait = min(*waits, (SAMPLE_AT - now.batches - 1) % SAMPLE_EVERY if sample else FAR, FAR)
        self._previous = Reading.of(now) if self._needs_previous and not self.wait else None
        return self.wait

    def _group(self, scheduled: Sequence[tuple[str, Schedule]]) -> None:
        """Group hooks by schedule: usually several share one, which is evaluated only once."""
        groups: dict[Schedule, list[str]] = {}
        for name, schedule in scheduled:
            groups.setdefault(schedule, []).append(name)
        self._scheduled, self._groups = scheduled, list(groups.items())
        self._needs_previous = any(schedule.by_tokens_or_time for schedule in groups)

    def _count_due(self, newly_due: Collection[str]) -> bool:
        """Count hooks that became due; returns whether the step is timed for one of them.

        Rarely scheduled hooks would otherwise never fall on a sampled micro-batch.
        """
        times = [self._times_due.get(name, 0) for name in newly_due]
        self._times_due.update(zip(newly_due, [count + 1 for count in times], strict=True))
        return any(count % TIMED_OF_DUE == 0 for count in times)

    def _count_batches(self, now: Clock) -> None:
        self._batches += 1 if self._decided_at is None else max(now.batches - self._decided_at, 1)
        self._decided_at = now.batches
        self._timed_batches += self.timed
        for name in self.due_at_step:
            self._due_batches[name] = self._due_batches.get(name, 0) + 1
            self._timed_due_batches[name] = self._timed_due_batches.get(name, 0) + self.timed

    def scale(self, name: str, since: int) -> float:
        """Return how many micro-batches each timed one of a hook stands for, with `since` after the last decision."""
        if name in self._due_batches:
            return self._due_batches[name] / max(self._timed_due_batches[name], 1)
        return (self._batches + since) / self._timed_batches if self._timed_batches else 1.0


class ManualClock:
    """Reads from the arguments of manually fired events where the loop is; what an event omits stays as it was."""

    def __init__(self) -> None:
        self._batches_of: Counter[str] = Counter()  # By loader.
        self.now = Reading(by_loader=self._batches_of)
        self._started = monotonic()
        self._position: tuple[int, int, int, str] | None = None

    def read(self, values: Mapping[str, Any]) -> None:
        """Take over what an event's arguments say about the loop's position."""
        given = {name: value for name, value in values.items() if isinstance(value, int)}
        now, batch = self.now, given["batch_idx"] + 1 if "batch_idx" in given else None
        now.steps = given.get("step", now.steps if batch is None else batch)
        now.batches = now.steps if batch is None else batch
        now.epochs = given["epoch"] + 1 if "epoch" in given else max(now.epochs, 1)
        now.tokens = given.get("tokens_seen", now.tokens)
        now.seconds = monotonic() - self._started
        now.loader = str(values.get("dataloader_name", now.loader))

    def advanced(self) -> bool:
        """Return True if the loop advanced to a new micro-batch since the last call."""
        before, self._position = self._position, (self.now.steps, self.now.batches, self.now.epochs, self.now.loader)
        if self._position != before and self.now.loader:
            self._batches_of[self.now.loader] += 1
        return self._position != before
