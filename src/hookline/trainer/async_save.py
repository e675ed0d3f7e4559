"""Write a checkpoint in a thread while training continues (`async_save`).

    boundary: copy to the host → thread: write, fsync, manifest, rename → a later boundary: on_checkpoint_save

Everything in here runs on the training thread. The other thread gets a copy that nothing else touches, and writes it as
any checkpoint is written.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.checkpoints.snapshot import HostMemory

if TYPE_CHECKING:
    from hookline.trainer.checkpointing import Draft
    from hookline.trainer.event_args import EventArgs


class SavedArgs:
    """The current event arguments, except for the counters: those are of the step that was saved."""

    def __init__(self, args: EventArgs) -> None:
        self.step, self.epoch, self.tokens_seen = args.step, args.epoch, args.tokens_seen
        self._args = args

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name)


@dataclass(frozen=True)
class PendingSave:
    """A save that was started and not reported yet."""

    name: str
    args: SavedArgs
    written: Future[Path]


class AsyncSave:
    """The checkpoint that is being written while training continues. There is one at most: the next one waits for it.

    No request is dropped for a newer one. So when saves are requested faster than the disk takes them, training waits,
    as it does without `async_save`.
    """

    def __init__(self) -> None:
        self._memory = HostMemory()
        self.pending: PendingSave | None = None

    def start(self, draft: Draft, args: EventArgs) -> None:
        """Copy a draft as it is now and let a thread write the copy."""
        assert self.pending is None, "the copy of the pending save would be overwritten"
        copied = replace(draft, sections=self._memory.snapshot(draft.sections))
        threads = ThreadPoolExecutor(1, thread_name_prefix="hookline-save")
        self.pending = PendingSave(draft.name, SavedArgs(args), threads.submit(copied.write))
        threads.shutdown(wait=False)  # the thread ends with its work: between two saves there is none to fork

    def is_done(self) -> bool:
        """Return whether a pending save is written, or has failed."""
        return self.pending is not None and self.pending.written.done()

    def take(self) -> PendingSave | None:
        """Wait for the pending save and return it, None if there is none; an interruption leaves it pending."""
        if self.pending is None:
            return None
        wait([self.pending.written])
        save, self.pending = self.pending, None
        return save

    def has_failed(self) -> bool:
        """Wait for the pending save and return whether it failed."""
        return self.pending is not None and self.pending.written.exception() is not None
