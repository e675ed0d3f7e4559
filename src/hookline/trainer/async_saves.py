"""Saving while training goes on (`async_save`): copied at a step's boundary, written by a thread, told at a later one.

    boundary: copy to the host → thread: write, fsync, manifest, rename → a later boundary: on_checkpoint_save

Everything in here runs on the thread that trains. The other one is given a draft whose memory nobody else touches, and
writes it as any checkpoint is written.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.checkpoints.snapshot import HostMemory
from hookline.events.policy import logger
from hookline.trainer.checkpointing import Draft, failing_as_told, tell_saved

if TYPE_CHECKING:
    from hookline.trainer.moment import RunMoment
    from hookline.trainer.trainer import Trainer


class SavedMoment:
    """Where the run is, but for the counters: they are those of the step that was saved."""

    def __init__(self, moment: RunMoment) -> None:
        self.step, self.epoch, self.tokens_seen = moment.step, moment.epoch, moment.tokens_seen
        self._now = moment

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now, name)


@dataclass(frozen=True)
class UnderWay:
    """A save that has begun and has not been told of."""

    name: str
    moment: SavedMoment
    written: Future[Path]


class BackgroundSaves:
    """The checkpoint that is being written beside training. There is one at most: the next one waits for it.

    Nothing that was asked for is dropped for something newer. So when saves are asked for faster than the disk takes
    them, training is held up, as it is without `async_save`.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._memory = HostMemory()
        self._save: UnderWay | None = None

    @property
    def name(self) -> str | None:
        """Of the checkpoint that was begun and has not been told of."""
        return None if self._save is None else self._save.name

    def begin(self, draft: Draft) -> None:
        """Copy what the draft holds as it is now, and let a thread write the copy."""
        assert self._save is None, "the memory of a save under way would be overwritten"
        copied = replace(draft, sections=self._memory.snapshot(draft.sections))
        threads = ThreadPoolExecutor(1, thread_name_prefix="hookline-save")
        self._save = UnderWay(draft.name, SavedMoment(self._trainer.moment), threads.submit(copied.write))
        threads.shutdown(wait=False)  # it ends with what it has to do: between two saves there is none to fork

    def look(self) -> None:
        """At a boundary: tell of the save if it is over, and go on if it is not."""
        if self._save is not None and self._save.written.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the save under way, if there is one; tell the hooks, or do what `on_save_error` says."""
        if self._save is None:
            return
        wait([self._save.written])  # an interruption in here leaves it under way
        save, self._save = self._save, None
        with failing_as_told(self._trainer, save.moment.step):
            path = save.written.result()
            tell_saved(self._trainer, path, save.moment)

    def make_way(self) -> None:
        """Before a checkpoint is written or loaded at once: as `finish`, but a failure waits for the boundary."""
        if self._save is not None and self._save.written.exception() is None:
            self.finish()

    def finish_after(self, error: BaseException) -> None:
        """The run has failed: what is being written becomes durable, and what goes wrong replaces no earlier error."""
        try:
            self.finish()
        except Exception as another:
            logger.warning("while the run was ending: %s", another)
            error.add_note(f"then, while the run was ending: {type(another).__name__}: {another}")
