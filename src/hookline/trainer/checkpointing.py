"""Decide when a trainer saves: the requested checkpoints are written at a boundary, in the background if asked to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hookline._console import logger
from hookline.checkpoints.find import find_whole
from hookline.checkpoints.format import Section, encode_section
from hookline.checkpoints.frozen import Fingerprints, frozen_parameters
from hookline.checkpoints.saves import Alike, OneSave, Save, SharedSave, on_all, without_alike
from hookline.checkpoints.snapshot import HostMemory
from hookline.checkpoints.store import SavedCheckpoint
from hookline.core.failures import hook_notes
from hookline.errors import CheckpointError, add_note, error_text
from hookline.run.agreement import SaveName
from hookline.run.event_args import EventArgs, GivenArgs
from hookline.trainer.rank_sections import alike_tensors
from hookline.trainer.sections import SAME_SECTIONS, collect_sections, restore_sections

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer


@dataclass(frozen=True)
class PendingSave:
    """A checkpoint that is being written while training continues, or was written and is not reported yet."""

    name: str
    args: GivenArgs
    save: Save
    written: Future[Any]
    state: SavedState


SavedState = tuple[int, int, bool]  # steps and micro-batches that are done, and whether the epoch is over


class Checkpointer:
    """The checkpoints of a trainer's runs: those that were requested, and the one that is being written.

    With `async_save` a checkpoint is copied to the host at a boundary, a thread writes the copy, and a later boundary
    fires on_checkpoint_save. Everything in here runs on the training thread; the other thread gets a copy that nothing
    else touches, and writes it as any checkpoint is written. Several ranks do all of it at the same steps; what they
    have to agree on is agreed on here, and never by the other thread.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._memory = HostMemory()
        self._pending: PendingSave | None = None
        self.requests: list[SaveName] = []  # names of the checkpoints to write at the next boundary
        self.requested_names: set[str] = set()  # those that were requested by `save`
        self.needs_save = False  # whether to write a checkpoint at the next boundary unless there is one of that state
        self._saved: SavedState | None = None  # the state that is durable and was saved last, at a boundary
        self.last_step: int | None = None  # the step of the checkpoint that was written or loaded last in this run
        self._frozen: Fingerprints | None = None  # the frozen parameters as the model came, with `trainable_only`

    @property
    def saving(self) -> str | None:
        """The name of the checkpoint that is being written in the background, if any."""
        return None if self._pending is None else self._pending.name

    # ---- saving ----------------------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Forget which checkpoints of the last run were requested and written."""
        self.requested_names.clear()
        self.needs_save, self._saved, self.last_step = False, None, None

    def find_frozen(self) -> None:
        """Note the frozen parameters, with `trainable_only`: before the first step, and before a checkpoint is loaded.

        A process that resumes has to have them without the checkpoint, so only what the model came with is left out.
        """
        if self._trainer.options.trainable_only and self._frozen is None:
            self._frozen = frozen_parameters(self._trainer.model)

    def unsaved_parameters(self) -> Fingerprints:
        """Return the frozen parameters that checkpoints leave out: those that have the values they came with.

        What changed since is saved, also without a gradient: the target network of a momentum encoder.
        """
        start = self._frozen or {}
        now = frozen_parameters(self._trainer.model) if start else {}
        return {name: one for name, one in now.items() if start.get(name) == one}

    def request(self, name: SaveName) -> None:
        """Write a checkpoint at the next boundary."""
        self.requests.append(name)

    def request_unless_saved(self) -> None:
        """Write a checkpoint at the next boundary unless there is one. A signal handler calls this: it only assigns."""
        self.needs_save = True

    def save_requested(self) -> None:
        """Write the requested checkpoints, each name once, in the background with `async_save`.

        A `fast_dev_run` writes nothing. No request is dropped for a newer one: when saves are requested faster than the
        disk takes them, training waits, as it does without `async_save`.
        """
        trainer = self._trainer
        names, self.requests = self.requests, []
        if not (names or self.needs_save) or trainer.options.fast_dev_run:
            return
        self.finish()  # before functions are called for names: they may look at what is on disk
        # A signal may arrive at any point of a save, also right after it: then the state is saved already.
        if not names and self._saved != self._state:
            names = [None]
        self.needs_save, unnamed = False, self._step_name()
        for name in dict.fromkeys((one() if callable(one) else one) or unnamed for one in names):
            self.finish()  # one at a time: the copy of the pending save would be overwritten
            with self._on_save_error(trainer.progress.steps_done):
                if trainer.options.async_save and trainer.status == "training":
                    save = self._begin(name, self._memory.snapshot)
                    threads = ThreadPoolExecutor(1, thread_name_prefix="hookline-save")
                    written = threads.submit(save.write)
                    self._pending = PendingSave(name, self._saved_args(), save, written, self._state)
                    threads.shutdown(wait=False)  # the thread ends with its work: between saves there is none to fork
                    trainer.request_boundary()  # from the next step on, `poll` is called after each, on all ranks
                else:  # a run that is closing has nothing else to do
                    trainer.save_checkpoint(name)
                    self.mark_saved()
        self.requested_names.update(one or unnamed for one in names if not callable(one))

    def save_now(self, name: str | None) -> Path:
        """Write a checkpoint and fire on_checkpoint_save once it is durable."""
        save = self._begin(name or self._step_name())
        path = save.finish(save.write)
        self._report_saved(path, self._trainer.event_args)
        return path

    def _begin(self, name: str, copy: Callable[[dict[str, Section]], dict[str, Section]] = dict) -> Save:
        """Begin a checkpoint of this state, on all ranks.

        Args:
            name: Its name.
            copy: Copies sections, if training is to continue while they are written.
        """
        trainer, ranks = self._trainer, self._trainer.ranks
        directory, meta = self._prepare()
        alike: Alike = {**dict.fromkeys(SAME_SECTIONS), "model": alike_tensors(trainer.model)}

        def collect() -> dict[str, Section]:
            sections = {key: encode_section(key, tree, with_shards=True) for key, tree in self._collect().items()}
            return copy(without_alike(sections, alike) if ranks.rank else sections)

        sections = on_all(ranks, collect)
        if ranks.world_size == 1:
            return OneSave(directory, name, sections, meta)
        return SharedSave(ranks, directory, name, sections, {**meta, "world_size": ranks.world_size}, alike)

    def mark_saved(self) -> None:
        """Note that a checkpoint holds the present state, as it is at a boundary.

        One that a hook writes in on_step_end does not: the step's validation and its schedulers come after it.
        """
        self._saved = self._state

    @property
    def _state(self) -> SavedState:
        progress = self._trainer.progress
        return progress.steps_done, progress.batches, progress.epoch_over

    def _prepare(self) -> tuple[Path, dict[str, Any]]:
        """Bring everything logged so far to the disk, and return directory and meta of a checkpoint of this state.

        After a failure in the middle of a step the step is left out unless an optimizer has stepped: the counters are
        those of the weights, and a run that resumes there starts after the batch that failed. The uninterrupted run
        never was in that state, so such a checkpoint is written where resuming the run does not find it.
        """
        trainer, progress = self._trainer, self._trainer.progress
        in_step, other = trainer.is_in_step, trainer.event_args.is_other_batch
        if (in_step or other) and trainer.status == "training":
            what = "validation" if other else "step"
            raise CheckpointError(f"half a {what} cannot be saved; trainer.save() waits for the end of the {what}")
        if trainer.status == "error" and trainer.ranks.world_size > 1:
            raise CheckpointError("a run on several ranks that has failed cannot be saved: they may be at other steps")
        self.finish_unless_failed()
        trainer.agreement.settle()  # what all ranks have counted is saved
        trainer.step_log.flush()
        trainer.record.sync()  # a resumed run repeats what came after its checkpoint, and nothing before
        directory = trainer.checkpoint_dir
        if in_step and trainer.run_dir is not None:
            directory = trainer.run_dir / "exception"
        if directory is None:
            why = "this run keeps no record on disk (record=False)" if trainer.running else "no run has begun yet"
            raise CheckpointError(f"{why}, so a checkpoint has no directory")
        return directory, {
            "run_id": trainer.run_id,
            "step": progress.steps_done,
            "epoch": progress.epoch,
            "lineage": trainer.record.lineage,
        }

    def _collect(self) -> dict[str, Any]:
        """Return the sections of a checkpoint, with `trainable_only` without the frozen parameters."""
        sections = collect_sections(self._trainer)
        if self._frozen is not None:
            unsaved = self.unsaved_parameters()
            sections["frozen"] = {name: now for name, now in unsaved.items() if name in sections["model"]}
            sections["model"] = {name: value for name, value in sections["model"].items() if name not in unsaved}
        return sections

    def _step_name(self) -> str:
        return f"step-{self._trainer.progress.steps_done:08d}"

    def _saved_args(self) -> GivenArgs:
        """Return event arguments with the counters of this step, for an event that is fired at a later one."""
        args = self._trainer.event_args
        return GivenArgs(args, SimpleNamespace(step=args.step, epoch=args.epoch, tokens_seen=args.tokens_seen))

    def _report_saved(self, path: Path, args: EventArgs | GivenArgs) -> None:
        """Record a durable checkpoint and fire on_checkpoint_save, with the arguments of the step that was saved."""
        self._trainer.event_args.set_checkpoint(str(path))
        self.last_step = args.step
        self._trainer.note("checkpoint_saved", args.step, path=str(path))
        if handler := self._trainer.hooks.slots.on_checkpoint_save:
            handler(args)

    @contextmanager
    def _on_save_error(self, step: int) -> Iterator[None]:
        """Count and record a failed save; `on_save_error` decides whether it ends the run."""
        try:
            yield
        except CheckpointError as error:
            if hook_notes(error):  # a hook's own failure, which its policy decides about
                raise
            self._trainer.run_status.count("failed_saves")
            self._trainer.note("checkpoint_failed", step, error=str(error))
            if self._trainer.options.on_save_error == "stop":
                raise
            logger.warning("step %d has no checkpoint, training continues: %s", step, error)

    # ---- the save in the background --------------------------------------------------------------------------------

    def poll(self) -> None:
        """Report the background save if it is done, on all ranks; called after every step while there is one.

        Asking the other ranks means waiting for them, so they are asked 1, 2, 4, 8 … steps after the save began.
        """
        if self._pending is None:
            return
        ranks, done = self._trainer.ranks, self._pending.written.done()
        if ranks.world_size > 1:
            passed = self._trainer.progress.step - self._pending.args.step
            done = passed.bit_count() == 1 and not ranks.decide(not done)
        if done:
            self.finish()

    def finish(self) -> None:
        """Wait for the background save, if any, and report it."""
        if self._pending is not None:
            wait([self._pending.written])  # an interruption in here leaves it pending
            save, self._pending = self._pending, None
            with self._on_save_error(save.args.step):
                path = save.save.finish(save.written.result)
                self._saved = save.state
                self._report_saved(path, save.args)

    def finish_unless_failed(self) -> None:
        """Do the same before a checkpoint is written at once; a failure is reported at the boundary."""
        if self._pending is not None:
            failed = self._pending.written.exception() is not None
            if not self._trainer.ranks.decide(failed):
                self.finish()

    def finish_after(self, error: BaseException) -> None:
        """Finish the background save of a run that failed; another failure becomes a note of the first error.

        With several ranks it is given up: the others may not have failed, and would not answer.
        """
        try:
            if self._pending is not None and self._trainer.ranks.world_size > 1:
                save, self._pending = self._pending, None
                wait([save.written])
                save.save.abandon()
                raise CheckpointError(f"step {save.args.step} has no checkpoint: a rank failed while it was written")
            self.finish()
        except Exception as another:
            logger.warning("while the run was ending: %s", error_text(another))
            add_note(error, f"then, while the run was ending: {error_text(another)}")

    def close(self) -> None:
        """Release the memory of background saves."""
        self._memory, self._pending = HostMemory(), None

    # ---- loading ---------------------------------------------------------------------------------------------------

    def load(self, path: str | Path) -> Path:
        """Restore the trainer from a checkpoint: its directory, a run's, or one that holds checkpoints."""
        trainer = self._trainer
        name, problems = trainer.ranks.first(partial(find_whole, Path(path)))
        found = Path(name)
        for problem in problems:
            trainer.note("checkpoint_damaged", problem=problem, instead=str(found))
        self.find_frozen()
        try:
            restore_sections(trainer, SavedCheckpoint(found, verify=False))
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{found} lacks something that a run needs to resume: {error!r}") from error
        trainer.event_args.set_checkpoint(str(found), resumed=True)
        self.last_step = trainer.progress.steps_done
        trainer.note("checkpoint_loaded", path=str(found))
        if trainer.running:
            trainer.record.resume_at(trainer.progress.step, trainer.progress.epoch)
        if handler := trainer.hooks.slots.on_checkpoint_load:
            handler(trainer.event_args)
        return found
