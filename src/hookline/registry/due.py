"""Which scheduled hooks are due at a micro-batch, asked only when the answer may have changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hookline.events.schedule import FAR, Clock, Reading, Schedule

SAMPLE_EVERY = 16  # inner events are timed on one micro-batch in so many,
SAMPLE_AT = 8  # but not on the first, which pays for warming up


class Agenda:
    """Counts down to the next micro-batch at which a schedule must be asked, or time be sampled."""

    def __init__(self) -> None:
        self.due: frozenset[str] = frozenset()
        self.timed = False
        self.batches = 0  # micro-batches so far
        self.sampled = 0  # of these, timed
        self._due_batches: Counter[str] = Counter()  # per scheduled hook
        self._due_sampled: Counter[str] = Counter()
        self._before = Reading()

    def ask(self, now: Clock, scheduled: Sequence[tuple[str, Schedule]], sample: bool) -> int:
        """Decide who is due now; returns for how many further micro-batches the decision holds."""
        before = self.due
        self.due = frozenset(name for name, schedule in scheduled if schedule.due(now, self._before))
        # A hook that has just become due is timed, too: one that is rarely due might else never be.
        self.timed = sample and (now.batches % SAMPLE_EVERY == SAMPLE_AT or self.due > before)
        self._count()
        if self.due or self.timed:
            wait = 0
        else:
            wait = min((schedule.wait(now) for _, schedule in scheduled), default=FAR)
        self._before = Reading.of(now)
        return min(wait, (SAMPLE_AT - now.batches - 1) % SAMPLE_EVERY if sample else FAR)

    def _count(self) -> None:
        self.sampled += self.timed
        self._due_batches.update(self.due)
        if self.timed:
            self._due_sampled.update(self.due)

    def scale(self, name: str) -> float:
        """How many micro-batches each timed one of a hook stands for."""
        if name in self._due_batches:
            return self._due_batches[name] / max(self._due_sampled[name], 1)
        return self.batches / self.sampled if self.sampled else 1.0
