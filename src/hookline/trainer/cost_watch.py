"""Says once, while the run is on, which hook takes more of the step's time than one would like."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from hookline.events.policy import Incident

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

SETTLED = 5.0  # seconds of a run before anything is said: the first steps pay for warming up


class CostWatch:
    """Compares what the hooks have cost inside steps with how long the run has taken."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._limit = trainer, trainer.options.warn_above
        self._began, self._before = perf_counter(), trainer.hooks.inner_seconds()
        self._told: set[str] = set()

    def look(self) -> None:
        """Report a hook that is above the limit, once."""
        elapsed = perf_counter() - self._began
        if self._limit is None or elapsed < SETTLED:
            return
        for name, seconds in self._trainer.hooks.inner_seconds().items():
            share = (seconds - self._before.get(name, 0.0)) / elapsed
            if share > self._limit and name not in self._told:
                self._told.add(name)
                self._report(name, share)

    def _report(self, name: str, share: float) -> None:
        entry = self._trainer.hooks.entry(name)
        if entry.intervenes:  # it is part of training, and works as often as it must
            return
        remedy = "give it a longer period" if not entry.schedule.always else "give it a schedule, such as every=10"
        message = f"takes {share:.0%} of the run's time (limit {self._limit:.0%}); {remedy}, or read fewer values"
        self._trainer.hooks.desk.report(Incident("costly", name, "its steps", self._trainer.step, message), True)
