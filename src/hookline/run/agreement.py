"""`Agreement`: what the ranks of a run decide together; in one process there is nothing to agree on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from hookline.ranks import Number
from hookline.run.status import Stop

if TYPE_CHECKING:
    from hookline.record.record import Record
    from hookline.run.run import Run

SaveName = str | Callable[[], str] | None
"""The name of a checkpoint, a function that returns it when it is written, or None for the name of its step."""


class Agreement:
    """Carry out requests at once, and agree on nothing. `RankAgreement` (trainer/agreement.py) asks the other ranks.

    Every method that the loop calls has its place in a step here, so that the loop itself asks nowhere how many
    processes there are.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    # ---- requests of hooks and signals -------------------------------------------------------------------------------

    def request_stop(self, stop: Stop) -> None:
        """Stop the run, once all ranks know about it."""
        self._run.run_status.stops.append(stop)

    def request_save(self, name: SaveName) -> bool:
        """Write a checkpoint, once all ranks know about it; return whether that may be before the next boundary."""
        self._run.save_at_boundary(name)
        return True

    def request_end(self, signal: str) -> None:
        """Save and end the run. A signal handler calls this, so it only assigns."""
        self._run.end_on_signal(signal)

    def request_skip(self, reason: str) -> None:
        """Skip the step.

        Raises:
            RankError: If the calling hook would skip the step on this rank alone.
        """
        self._run.event_args.skip_reason = reason

    def note_assignment(self, name: str, value: Any, by: str | None) -> None:
        """Compare an assignment to an attribute of the run with those of the other ranks, when they next agree.

        Args:
            name: The attribute.
            value: The assigned value, as an error names it.
            by: The hook that assigned it; None if no hook did.
        """

    # ---- in the order of a run ---------------------------------------------------------------------------------------

    def before_run(self) -> None:
        """Check that the ranks have the same options and hooks, before the run has a record."""

    def record_of_ranks(self, record: Record) -> Record:
        """Return the record of the run, which combines the numbers of all ranks."""
        return record

    def begin_run(self) -> None:
        """Forget the requests of the last run."""

    def restored(self) -> None:
        """Take over the counters of a checkpoint that was loaded."""

    def measure(self, compute: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the forward pass of a batch, with a clock around it if the ranks compare their times."""
        return compute

    def before_epoch(self, loaders: Any, epoch: int) -> None:
        """Check that the ranks have the same number of batches, and make them shuffle in the same way."""

    def batches(self, batches: Iterable[Any], loaders: Any) -> Iterable[Any]:
        """Return the batches of an epoch; the first ones of the ranks are compared."""
        return batches

    def tokens_seen(self) -> int:
        """Return the tokens of all ranks; waits for them, once per micro-batch."""
        return self._run.progress.tokens_seen

    def before_update(self) -> None:
        """Decide whether the step is skipped because a hook has requested it on some rank."""

    def before_optimizer(self) -> None:
        """Decide again after the update chain, if a hook may ask for it there."""

    def record_mean(self, name: str, value: Any, is_optional: bool) -> None:
        """Record a metric of the step as the mean over the ranks; a rank may have no value of an optional one."""
        self._run.log(name, value)

    def average_stats(self) -> None:
        """Combine means, latest values and the step's loss over all ranks, wherever hooks decide by them.

        That is before a validation and at the end of an epoch, which all ranks reach.
        """

    def end_step(self) -> None:
        """Stop the clock of this rank's step, and raise RankError if another rank has failed."""

    def next_step(self) -> float:
        """Return the step after which `after_step` must run next."""
        return math.inf

    def after_step(self, step: int) -> None:
        """Carry out agreed requests, and send new ones if it is time to agree."""

    def after_validation(self) -> None:
        """Exchange the numbers that the ranks have recorded; all of them call this."""

    def after_epoch(self, read: int, expected: int | None) -> None:
        """Check that all ranks have read the same number of batches: `read`, of those `expected`."""

    def settle(self) -> None:
        """Wait until all ranks know all requests, and carry them out: at the start, between epochs, at the end."""

    def end_epoch(self) -> None:
        """Agree on requests, and write the recorded numbers."""
        self._run.step_log.flush()

    def after_train_end(self) -> None:
        """Carry out requests that hooks made in on_train_end, which all ranks learn about only now."""

    def count_once(self, count: Number) -> Number:
        """Return what this rank adds to a count over all ranks: nothing if a lower rank has the same batches."""
        return count
