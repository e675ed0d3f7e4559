"""`RunStatus`: whether a run is in progress, who asked it to stop, and what went wrong in it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from hookline._console import print_line

SIGNAL = "signal"


class Stop(NamedTuple):
    """A request to end the run, and the hook that made it; `SIGNAL` stands in place of a hook's name."""

    reason: str
    by: str | None
    rank: int = 0


class RunStatus:
    """Whether the run is in progress, how it ends, and what went wrong in it."""

    SAVED = ("skipped_steps", "non_finite_losses")

    def __init__(self) -> None:
        self.status = "training"
        self.running = False
        self.pid = os.getpid()  # the process in which it began
        self.run_ended = False  # a run has ended and nothing has begun since
        self.by_hand = False  # steps outside of a run have been made since the last one
        self.stops: list[Stop] = []  # Requested stops in order; the reason of the first counts.
        self.failed_on_ranks: dict[str, list[int]] = {}  # the hooks that have failed on other ranks; known at the end
        self.loaded_stop: Mapping[str, Any] | None = None  # the stop that the loaded checkpoint was saved with
        self.skipped_steps = self.non_finite_losses = self.failed_saves = self.lr_changes = self.hook_failures = 0
        self.bad_weights = ""  # Describes the trained parameters that are not finite; known at the end.
        self.failures_elsewhere = 0  # exceptions of hooks on other ranks; known at the end
        self._reported: set[str] = set()

    def begin(self) -> None:
        """Begin a run."""
        self.running, self.run_ended, self.by_hand, self.status = True, False, False, "training"
        self.pid = os.getpid()
        self.stops, self.loaded_stop, self.failed_on_ranks, self.bad_weights = [], None, {}, ""

    def end_forked_process(self, error: BaseException | None = None) -> None:
        """End this process if it is a copy that a hook has forked: two processes must not write into one run.

        Args:
            error: The error that ends the run in this process; the status of a SystemExit stays.
        """
        if self.pid == os.getpid():
            return
        code = error.code if isinstance(error, SystemExit) else 1
        if not isinstance(error, SystemExit):
            why = f"process {os.getpid()} is a copy of the run's process {self.pid}, which a hook has forked"
            print_line(f"hookline: {why}; it ends here. End a forked process with os._exit()", sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))

    def close(self, failed: bool) -> None:
        """Note that the last step is done, or that an exception ends the run; the closing events come next."""
        self.status = "error" if failed else "completed"

    def end(self) -> None:
        """End the run, after its last event."""
        self.running, self.run_ended = False, True

    @contextmanager
    def manual_step(self) -> Iterator[None]:
        """Count as running during a step outside of a run: its events must not start another one."""
        self.running, self.run_ended, self.by_hand = True, False, True
        self.pid = os.getpid()
        try:
            yield
        finally:
            self.running = False

    @property
    def signal(self) -> str | None:
        """The name of the signal that ends the run on all ranks, if one does."""
        return next((stop.reason for stop in self.stops if stop.by == SIGNAL), None)

    @property
    def lasting_stop(self) -> Stop | None:
        """The stop that ends the run: a signal ends only this attempt."""
        return next((stop for stop in self.stops if stop.by != SIGNAL), None)

    def first_time(self, what: str) -> bool:
        """Return True the first time that something must be reported."""
        is_first = what not in self._reported
        self._reported.add(what)
        return is_first

    def state_dict(self) -> dict[str, Any]:
        """Return the counts that checkpoints save."""
        return {name: getattr(self, name) for name in self.SAVED}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts; a saved stop is stored, but does not stop anything yet."""
        for name in self.SAVED:
            setattr(self, name, state[name])
        self.loaded_stop = state.get("stop")  # only saved if one was requested
