"""Decide when a run saves: at a boundary after a request or a signal, in the background if asked to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hookline._console import logger
from hookline.checkpoints.find import Found, find_checkpoint
from hookline.checkpoints.format import Section, encode_section
from hookline.checkpoints.frozen import Fingerprints, frozen_parameters
from hookline.checkpoints.saves import HostMemory, OneSave, Save, SharedSave, on_all, without_alike
from hookline.checkpoints.store import SavedCheckpoint
from hookline.errors import CheckpointError, ConfigError, RecordError, TrainingError, add_note, error_text
from hookline.record.record import Record
from hookline.run.agreement import SaveName
from hookline.run.parameters import is_finite
from hookline.runs.named import find_run
from hookline.trainer.epochs import EpochRun
from hookline.trainer.sections import alike_sections, collect_sections, load_weights, restore_sections


@dataclass(frozen=True)
class PendingSave:
    """A checkpoint that is being written while training continues, or was written and is not reported yet."""

    name: str
    step: int
    given: Mapping[str, Any]
    """The other arguments that on_checkpoint_save gets at a later step: the counters of this one."""
    save: Save
    written: Future[Any]
    state: SavedState


SavedState = tuple[int, int, bool]  # steps and micro-batches that are done, and whether the epoch is over


class CheckpointedRun(EpochRun):
    """A run that writes checkpoints and resumes from them: those that were requested, and the one being written.

    With `async_save` a checkpoint is copied to the host at a boundary, a thread writes the copy, and a later boundary
    fires on_checkpoint_save. Everything in here runs on the training thread; the other thread gets a copy that nothing
    else touches, and writes it as any checkpoint is written. Several ranks do all of it at the same steps; any
    agreement happens here, and never in the other thread.
    """

    # `Trainer` makes these.
    val_loaders: dict[str, Any]
    schedulers: list[Any]
    optimizer_settings: list[list[dict[str, Any]]]
    """The options with which the optimizers' groups were created, by optimizer; a resumed run keeps its own."""

    can_save = True
    _needs_save = False  # whether to write a checkpoint at the next boundary unless there is one of that state
    _pending: PendingSave | None = None
    # The last state that was saved at a boundary and is durable. A checkpoint that a hook writes in on_step_end has a
    # different state: the step's validation and its schedulers come later.
    _saved: SavedState | None = None
    _has_initial_weights = False  # whether the weights of `init_from` or of a checkpoint were loaded
    _frozen: Fingerprints | None = None  # the frozen parameters as the model came, with `trainable_only`

    @property
    def saving(self) -> str | None:
        """The name of the checkpoint that is being written in the background (`async_save`), if any."""
        return None if self._pending is None else self._pending.name

    @property
    def pending_save(self) -> str | None:
        """Why the next step boundary writes a checkpoint: "signal", "request", or None if it writes none."""
        return "signal" if self._needs_save else super().pending_save

    # ---- the run -----------------------------------------------------------------------------------------------------

    def open(self, record: Record | None = None) -> None:
        """Open the record, and forget which checkpoints of the last run were requested and written."""
        self.requested_checkpoints, self._memory = frozenset(), HostMemory()
        self._needs_save, self._saved, self.last_saved_step = False, None, None
        super().open(record)
        self.until_end.callback(self._release_copies)

    def finish(self) -> None:
        """Save what remains to be saved after a run's last step."""
        self.agreement.settle()
        self.finish_save()  # so that checkpoint hooks know what is saved
        super().finish()
        self.save_requested()
        self.finish_save()

    def after_exception(self, error: BaseException) -> None:
        """Finish the background save of a run that failed; another failure becomes a note of the first error.

        With several ranks it is abandoned, because the others may not have failed and would not answer.
        """
        try:
            if self._pending is not None and isinstance(shared := self._pending.save, SharedSave):
                save, self._pending = self._pending, None
                wait([save.written])
                shared.abandon()
                raise CheckpointError(f"step {save.step} has no checkpoint: a rank failed while it was written")
            self.finish_save()
        except Exception as another:
            logger.warning("while the run was ending: %s", error_text(another))
            add_note(error, f"then, while the run was ending: {error_text(another)}")

    def end_on_signal(self, name: str, rank: int = 0) -> None:
        """Save and end the run now, because of a signal that a rank received. A signal handler may call this."""
        if rank != self.ranks.rank and self.prints:
            logger.warning("rank %d has received %s: all ranks end after this step", rank, name)
        super().end_on_signal(name, rank)
        if self.checkpoint_dir is not None:
            self._needs_save = True

    def _release_copies(self) -> None:
        """Release the memory of background saves."""
        self._memory, self._pending = HostMemory(), None

    # ---- saving ------------------------------------------------------------------------------------------------------

    def save(self, name: SaveName = None) -> None:
        """Write a checkpoint at the next step boundary; if the run is closing, at once, or with several ranks soon.

        Args:
            name: Its name; by default, it is named after its step. A function is called for the name when the
                checkpoint is written. A name that is requested twice is written once.
        """
        at_once = self.agreement.request_save(name)
        self.request_boundary()
        if at_once and self.status != "training" and self.running:
            self.save_requested()

    def save_checkpoint(self, name: str | None = None) -> Path:
        """Write a checkpoint now, between two steps or after a failure; fires on_checkpoint_save once it is durable."""
        with self.hooks.collectives.allow("save_checkpoint()"):
            save = self._begin_save(name or self.step_name(), copies=False)
            path = save.finish(save.write)
            self.report_saved(path, self.progress.steps_done)  # after a failure in a step it is of the step before
            return path

    def find_frozen(self) -> None:
        """Note the frozen parameters, with `trainable_only`: before the first step, and before a checkpoint is loaded.

        A resuming process needs them without the checkpoint, so only parameters that the model came with are left out.
        """
        if self.options.trainable_only and self._frozen is None:
            self._frozen = frozen_parameters(self.model)

    def unsaved_parameters(self) -> Mapping[str, Mapping[str, Any]]:
        """Return shape, dtype and sum of bits of the frozen parameters that checkpoints omit; often none.

        They have the values that they came with. A frozen parameter that changed since is saved, such as the target
        network of a momentum encoder.
        """
        start = self._frozen or {}
        now = frozen_parameters(self.model) if start else {}
        return {name: fingerprint for name, fingerprint in now.items() if start.get(name) == fingerprint}

    def save_requested(self) -> None:
        """Write the requested checkpoints, each name once, in the background with `async_save`.

        A `fast_dev_run` writes nothing. No request is dropped for a newer one: when saves are requested faster than the
        disk takes them, training waits, as it does without `async_save`. A run that continues waits for its first step:
        if it fails before that, nothing in its directory has changed.
        """
        if not (self._requests or self._needs_save) or self.ranks.decide(self.record.is_tentative):
            return
        names = self.take_requests()
        if self.options.fast_dev_run:
            return
        self.finish_save()  # before functions are called for names: they may look at what is on disk
        # A signal may arrive at any point of a save, even right after it: then the state is already saved.
        if not names and self._saved != self._state:
            names = (None,)
        self._needs_save = False
        for name in self.requested_names(names):
            self.finish_save()  # one at a time: the copy of the pending save would be overwritten
            with self.report_failed_save(self.progress.steps_done):
                if self.options.async_save and self.status == "training":
                    save = self._begin_save(name, copies=True)
                    written = _in_thread(save.write)
                    counters = {"epoch": self.epoch, "tokens_seen": self.event_args.tokens_seen}
                    self._pending = PendingSave(name, self.step, counters, save, written, self._state)
                    self.request_boundary()  # from the next step on, `_poll_save` runs after each step, on all ranks
                else:  # a run that is closing has nothing else to do
                    self.save_checkpoint(name)
                    self._saved = self._state

    def _begin_save(self, name: str, copies: bool) -> Save:
        """Begin a checkpoint of this state, on all ranks.

        Args:
            name: Its name.
            copies: Whether to copy what is saved, because training continues while it is written.
        """
        ranks = self.ranks
        directory, meta = self._prepare_save()
        alike = alike_sections(self.model)

        def collect() -> dict[str, Section]:
            trees = collect_sections(self)
            if self._frozen is not None:
                unsaved = self.unsaved_parameters()
                trees["frozen"] = {name: now for name, now in unsaved.items() if name in trees["model"]}
                trees["model"] = {name: value for name, value in trees["model"].items() if name not in unsaved}
            sections = {key: encode_section(key, tree, with_shards=True) for key, tree in trees.items()}
            if ranks.rank:
                sections = without_alike(sections, alike)
            return self._memory.snapshot(sections) if copies else sections

        sections = on_all(ranks, collect)
        if ranks.world_size == 1:
            return OneSave(directory, name, sections, meta)
        return SharedSave(ranks, directory, name, sections, {**meta, "world_size": ranks.world_size}, alike)

    @property
    def _state(self) -> SavedState:
        return self.progress.steps_done, self.progress.batches, self.progress.epoch_over

    def _prepare_save(self) -> tuple[Path, dict[str, Any]]:
        """Bring everything logged so far to the disk, and return directory and meta of a checkpoint of this state.

        After a failure in the middle of a step the step is left out unless an optimizer has stepped: the counters are
        those of the weights, and a run that resumes there starts after the batch that failed. The uninterrupted run
        never was in that state, so such a checkpoint is written where resuming the run does not find it.
        """
        in_step, other = self.is_in_step, self.event_args.is_other_batch
        if (in_step or other) and self.status == "training":
            what = "validation" if other else "step"
            raise CheckpointError(
                f"save_checkpoint() cannot save in the middle of a {what}; call trainer.save(), which waits for its end"
            )
        if self.status == "error" and self.ranks.world_size > 1:
            raise CheckpointError("a failed run with several ranks cannot be saved: they may be at different steps")
        if self._pending is not None:  # a failure of that save is reported at the boundary
            failed = self._pending.written.exception() is not None
            if not self.ranks.decide(failed):
                self.finish_save()
        self.record.commit()  # now that nothing refuses the save
        self.agreement.settle()  # what all ranks have counted is saved
        self.step_log.flush()
        self.record.sync()  # a resumed run repeats what came after its checkpoint, and nothing before
        directory = self.checkpoint_dir
        if in_step and self.run_dir is not None:
            directory = self.run_dir / "exception"
        if directory is None:
            why = "this run keeps no record on disk (record=False)" if self.running else "no run has begun yet"
            raise CheckpointError(f"{why}, so there is no directory for a checkpoint")
        return directory, {
            "run_id": self.run_id,
            "step": self.progress.steps_done,
            "epoch": self.progress.epoch,
            "lineage": self.record.run.get("lineage"),
        }

    # ---- the save in the background --------------------------------------------------------------------------------

    def _poll_save(self) -> None:
        """Report the background save if it is done, on all ranks; called after every step while there is one.

        Asking the other ranks means waiting for them, so they are asked 1, 2, 4, 8 … steps after the save began.
        """
        if self._pending is None:
            return
        ranks, done = self.ranks, self._pending.written.done()
        if ranks.world_size > 1:
            passed = self.progress.step - self._pending.step
            done = passed.bit_count() == 1 and not ranks.decide(not done)
        if done:
            self.finish_save()

    def finish_save(self) -> None:
        """Wait for the background save, if any, and report it."""
        if self._pending is not None:
            wait([self._pending.written])  # an interruption here leaves it pending
            save, self._pending = self._pending, None
            with self.report_failed_save(save.step):
                path = save.save.finish(save.written.result)
                self._saved = save.state
                self.report_saved(path, save.step, **save.given)

    # ---- loading ---------------------------------------------------------------------------------------------------

    def load_checkpoint(self, path: str | Path | None) -> Path:
        """Restore the trainer from a checkpoint, or the newest one of a run, and fire on_checkpoint_load.

        Raises:
            CheckpointError: If there is none, or it does not fit; also for None, the `run_dir` of a run without one.
            TrainingError: Inside a run, because its data and its record would not go back with the weights.
        """
        if self.running:
            raise TrainingError(
                "load_checkpoint() cannot be called inside an event or while the trainer runs: call it between two "
                "runs, or stop (trainer.request_stop) and continue with fit(resume=…)"
            )
        if path is None:
            raise CheckpointError("the path is None: a run with record=False, or that has not begun, has no directory")
        return self.restore(self.find_saved(path))

    def find_saved(self, given: str | Path) -> Path:
        """Return the run or the checkpoint that a path or a name stands for; names are those of runs in `output_dir`.

        Raises:
            CheckpointError: If there is none.
        """
        try:
            return Path(self.ranks.first(lambda: str(find_run(given, self.options.output_dir))))
        except RecordError as error:
            raise CheckpointError(str(error)) from error

    def find_initial_weights(self) -> None:
        """Replace a name in `init_from` with the path that it stands for now, which the record then has."""
        options = self.options
        if options.init_from and not self._has_initial_weights:
            try:
                options.init_from = str(self.find_saved(options.init_from))
            except CheckpointError as error:
                raise ConfigError("trainer.init_from", str(error)) from error

    def load_initial_weights(self) -> None:
        """Load the weights that `init_from` names, once: before the first run, validation or prediction."""
        self.find_initial_weights()
        if self.options.init_from and not self._has_initial_weights:
            load_weights(self.model, self.options.init_from)
        self._has_initial_weights = True

    def load_weights(self, path: str | Path | SavedCheckpoint) -> None:
        """Load only the weights of a checkpoint, instead of those that `init_from` names."""
        if self.options.trainable_only:
            self.load_initial_weights()
        load_weights(self.model, path)
        self._has_initial_weights = True

    def restore(self, path: str | Path | Found) -> Path:
        """Restore the run from a checkpoint: its directory, a run's, or one that holds checkpoints.

        Rank 0 finds it, unless it was found before, and verifies every byte, which is read once.
        """
        verified: list[SavedCheckpoint] = []

        def verify() -> tuple[str, list[str]]:
            found = path if isinstance(path, Found) else find_checkpoint(Path(path))
            verified.append(found.checkpoint.verified())
            return str(verified[0].path), found.problems

        name, problems = self.ranks.first(verify)
        checkpoint = Path(name)
        for problem in problems:
            self.note("checkpoint_damaged", problem=problem, instead=str(checkpoint))
        self.find_frozen()
        try:
            restore_sections(self, verified[0] if verified else SavedCheckpoint(checkpoint))
        except (KeyError, TypeError, AttributeError, ValueError, IndexError, OverflowError) as error:
            raise CheckpointError(f"{checkpoint} lacks something that a run needs to resume: {error!r}") from error
        bad = next((name for name, param in self.params.items() if not is_finite(param)), None)
        if bad is not None:
            words = "the weights of %s are not finite, first %r: resume from a checkpoint of an earlier step"
            logger.warning(words, checkpoint, bad, of_rank=True)
        self._has_initial_weights = True
        self.event_args.set_checkpoint(str(checkpoint), resumed=True)
        self.last_saved_step = self.progress.steps_done
        self.note("checkpoint_loaded", path=str(checkpoint))
        if self.running:
            self.record.resume_at(self.progress.step, self.progress.epoch)
            if self.checkpoint_dir is not None and checkpoint.absolute().parent == self.checkpoint_dir.absolute():
                self._saved = self._state  # otherwise it belongs to another run
        if handler := self.hooks.slots.on_checkpoint_load:
            handler(self.event_args)
        return checkpoint


def _in_thread(write: Callable[[], Any]) -> Future[Any]:
    """Call a function in a thread that ends with it, or in this one if the system has no more threads."""
    threads = ThreadPoolExecutor(1, thread_name_prefix="hookline-save")
    try:
        return threads.submit(write)
    except RuntimeError as error:  # the same failure occurs below, too, and is reported as usual
        logger.warning("training waits for this save, because no thread could be started: %s", error)
        written: Future[Any] = Future()
        try:
            written.set_result(write())
        except Exception as failure:
            written.set_exception(failure)
        return written
    finally:
        threads.shutdown(wait=False)  # no thread exists between saves, so that the process can fork
