"""`SavingRun`: the checkpoints that a run was asked for. Its host decides about their content and their time."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hookline._console import logger
from hookline.core.failures import hook_notes
from hookline.errors import CheckpointError, cut
from hookline.run.agreement import SaveName
from hookline.run.event_args import GivenArgs
from hookline.run.run import Run


class SavingRun(Run):
    """A run that takes requests for checkpoints, and reports those that were written or have failed."""

    requested_checkpoints: AbstractSet[str] = frozenset()
    """Names of checkpoints that were requested by `save`, which no retention policy may delete."""
    stops_without_checkpoint = False
    """Whether a checkpoint that cannot be written ends the run."""
    _requests: tuple[SaveName, ...] = ()  # names of the checkpoints to write at the next boundary

    @property
    def pending_save(self) -> str | None:
        """Why the next step boundary writes a checkpoint: "request", or None if it writes none."""
        return "request" if self._requests else None

    def save_at_boundary(self, name: SaveName) -> None:
        """Write a checkpoint at the next boundary."""
        self._requests += (name,)

    def take_requests(self) -> tuple[SaveName, ...]:
        """Return the names that were requested, and forget the requests."""
        names, self._requests = self._requests, ()
        return names

    def requested_names(self, names: tuple[SaveName, ...]) -> list[str]:
        """Return what to call the checkpoints that were requested, each name once."""
        unnamed = self.step_name()
        self.requested_checkpoints |= {given or unnamed for given in names if not callable(given)}
        return list(dict.fromkeys((given() if callable(given) else given) or unnamed for given in names))

    def step_name(self) -> str:
        """Return the name of a checkpoint that was given none."""
        return f"step-{self.progress.steps_done:08d}"

    def report_saved(self, path: Path, step: int, **given: Any) -> None:
        """Record a durable checkpoint and fire on_checkpoint_save; `given` are more arguments of the saved step."""
        self.event_args.set_checkpoint(str(path))
        self.last_saved_step = step
        self.note("checkpoint_saved", step, path=str(path))
        if handler := self.hooks.slots.on_checkpoint_save:
            handler(GivenArgs(self.event_args, SimpleNamespace(step=step, **given)))

    @contextmanager
    def report_failed_save(self, step: int) -> Iterator[None]:
        """Count and record a save that fails in the block; `stops_without_checkpoint` decides whether the run ends."""
        try:
            yield
        except CheckpointError as error:
            if hook_notes(error):  # a hook's own failure, which its policy decides about
                raise
            self.run_status.failed_saves += 1
            self.note("checkpoint_failed", step, error=cut(str(error)))
            if self.stops_without_checkpoint:
                raise
            logger.warning("step %d has no checkpoint, training continues: %s", step, error)
