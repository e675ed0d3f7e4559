"""The outcomes of a run, as in run.json, and the exit code of each; this module needs no torch."""

from __future__ import annotations

from enum import StrEnum

TERMINATED = 143
"""The exit code of a process that ends on SIGTERM, once its run is closed."""


class Outcome(StrEnum):
    """How a run ended; `Run.decide_outcome` decides it."""

    COMPLETED = "completed"
    STOPPED = "stopped"  # a hook or the user's code called `request_stop`
    NON_FINITE = "non_finite"  # its weights are NaN or infinite at its end, or a hook that explains NaN has stopped it
    INTERRUPTED = "interrupted"  # by a signal, Ctrl-C or SystemExit
    FAILED = "failed"

    @property
    def exit_code(self) -> int:
        """The exit code of a command; it is `TERMINATED` instead of 130 if the signal was SIGTERM."""
        return {"completed": 0, "stopped": 0, "non_finite": 3, "interrupted": 130, "failed": 1}[self.value]

    @property
    def is_clean(self) -> bool:
        """Whether the run finished, or was asked to stop, without an exception or a signal."""
        return self in (Outcome.COMPLETED, Outcome.STOPPED, Outcome.NON_FINITE)
