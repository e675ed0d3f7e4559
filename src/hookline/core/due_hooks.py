"""Decide which scheduled hooks are due at a micro-batch; schedules are evaluated only when the answer may change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from hookline.core.catalog import Event
from hookline.core.schedule import FAR, Clock, Reading, Schedule

if TYPE_CHECKING:
    from hookline.core.entry import Entry


class Decision(NamedTuple):
    """Everything that the callables of events depend on."""

    due: frozenset[str] = frozenset()
    """Scheduled hooks that are due at this micro-batch."""
    due_at_step: frozenset[str] = frozenset()
    """Scheduled hooks that are due at one of this step's micro-batches so far."""

    def due_for(self, event: Event) -> frozenset[str]:
        """Return the scheduled hooks that are called at an event.

        A hook that came due within a step's window is called at the step's events, which come when the window ends.
        """
        return self.due_at_step if event.of_step else self.due


class Scheduler:
    """Counts down to the next micro-batch at which a schedule must be evaluated."""

    def __init__(self) -> None:
        self.decision = Decision()
        self.countdown = 0
        """Micro-batches until a hook may become due."""
        self.groups: dict[Schedule, list[str]] | None = None
        """Hooks that are not always due, by schedule; None if the hooks have changed since the last decision."""
        self._needs_previous = False  # A schedule by tokens or time compares with the previous micro-batch.
        self._previous: Reading | None = Reading()  # None if no schedule was evaluated at the previous micro-batch.
        self._window: tuple[int, int] | None = None  # Step and epoch of the last decision.

    def evaluate_next(self, hooks_changed: bool = False) -> None:
        """Evaluate the schedules at the next micro-batch; all of them are read again if the hooks have changed."""
        self.countdown = 0
        if hooks_changed:
            self.groups = None

    def replan(self, restored: Clock | None) -> None:
        """Evaluate every schedule at the next micro-batch: an epoch began, or counters were `restored`."""
        if restored is not None:
            self._previous = Reading.of(restored)
        self._window = None  # A step begins with it, even if it has the number of one that was abandoned.
        self.evaluate_next()

    def forget(self, hook: str) -> None:
        """Forget a removed hook, because another may take its name."""
        decision = self.decision
        self.decision = Decision(decision.due - {hook}, decision.due_at_step - {hook})

    def decide(self, now: Clock, entries: Iterable[Entry], counts_down: bool = True) -> None:
        """Decide which of the registry's hooks are due now, and for how many further micro-batches that holds.

        Args:
            now: Where the loop is.
            entries: The hooks.
            counts_down: Whether the next micro-batches follow this one; else the next one is decided by itself.
        """
        groups = self._plan(entries) if self.groups is None else self.groups
        window = now.steps, now.epochs
        in_window = self.decision.due_at_step if self._window == window else frozenset()
        due = self._due(now, groups, in_window)
        self.decision, self._window = Decision(due, in_window | due), window
        # While a hook is due, the next micro-batch has another answer.
        is_settled = counts_down and not self.decision.due_at_step
        self.countdown = min((schedule.wait(now) for schedule in groups), default=FAR) if is_settled else 0
        self._previous = Reading.of(now) if self._needs_previous and not self.countdown else None

    def _due(self, now: Clock, groups: dict[Schedule, list[str]], in_window: frozenset[str]) -> frozenset[str]:
        """Return the scheduled hooks that are due now, given those that were due earlier in the step's window."""
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
        return frozenset(names)

    def _plan(self, entries: Iterable[Entry]) -> dict[Schedule, list[str]]:
        """Group hooks by schedule: usually several share one, which is evaluated only once."""
        groups: dict[Schedule, list[str]] = {}
        for entry in entries:
            if entry.enabled_for_ranks and not entry.schedule.always:
                groups.setdefault(entry.schedule, []).append(entry.name)
        self._needs_previous = any(schedule.by_tokens_or_time for schedule in groups)
        self.groups = groups
        return groups
