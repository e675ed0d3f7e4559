"""How a run begins and ends: the record opened before step 1, and closed whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hookline.checkpoints.abandoned import set_aside_later
from hookline.errors import ConfigError, TrainingError, nearest
from hookline.events.policy import Incident, logger
from hookline.record.jsonsafe import field_values
from hookline.record.redacted_log import secrets_kept_out
from hookline.record.redaction import redact_text
from hookline.registry.entry import Entry
from hookline.trainer.async_saves import BackgroundSaves
from hookline.trainer.checkpointing import (
    has_no_checkpoint_yet,
    lineage_of,
    load_weights,
    position_of,
    run_directory,
)
from hookline.trainer.loaders import epoch_length
from hookline.trainer.loop import Loop
from hookline.trainer.parameters import cuda_devices_of
from hookline.trainer.positions import doubts_about
from hookline.trainer.rng import seed_everything
from hookline.trainer.signals import Signals, obeying_signals
from hookline.trainer.validation import sanity_check

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer


@contextmanager
def running(trainer: Trainer, resume: str | Path | None, fork: bool = False) -> Iterator[None]:
    """Bracket a run: on_train_start before, on_exception if it fails, on_train_end and the closed record always."""
    forget_incidents = begin(trainer, resume, fork)
    outcome, reason = "completed", None
    with obeying_signals(trainer) as signals, secrets_kept_out():
        try:
            with deterministic(trainer.options.deterministic), loaders_known(trainer):
                prepare(trainer, resume)
                if heard := trainer.hooks.fire.on_train_start:
                    heard(trainer.moment)
                yield
                trainer.save_if_asked()
                trainer.background.finish()
            trainer.status = "completed"
            outcome, reason = how_it_ended(trainer, signals)
        except BaseException as error:
            outcome = "failed" if isinstance(error, Exception) else "interrupted"
            reason = in_words(error)
            fail(trainer, error)
            raise
        finally:
            try:
                end(trainer, outcome, reason)
            finally:
                forget_incidents()
                trainer.running, trainer.run_ended = False, True
    signals.leave()


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Ask torch for deterministic algorithms, for as long as the run lasts; touch nothing unless asked to."""
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    if wanted:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        if wanted:
            torch.use_deterministic_algorithms(before, warn_only=warn_only)


@contextmanager
def loaders_known(trainer: Trainer) -> Iterator[None]:
    """While a run is on, a schedule that counts the batches of a loader that is not there would never be due."""

    def check(entry: Entry) -> None:
        for name in entry.schedule.loaders:
            if name not in trainer.train_loaders:
                why = f"{entry.schedule}: there is no training loader {name!r}; {nearest(name, trainer.train_loaders)}"
                raise ConfigError(f"{entry.name}.every", why)

    forget = trainer.hooks.admit_with(check)
    try:
        yield
    finally:
        forget()


def begin(trainer: Trainer, resume: str | Path | None, fork: bool = False) -> Callable[[], None]:
    """Seeds and the record on disk: from here on, whatever happens is recorded and the record is closed."""
    options = trainer.options
    if options.seed is not None:
        seed_everything(options.seed)
    run_dir = None if resume is None or fork else run_directory(Path(resume))
    lineage = lineage_of(Path(resume)) if resume is not None and run_dir is None else None
    trainer.record = trainer.make_record(trainer.describe(), run_dir)
    trainer.record.start(hooks=hook_list(trainer), lineage=lineage)
    trainer.moment.position = position_of(trainer)  # the loop that is left may be inside an epoch
    trainer.loop = Loop(trainer)
    trainer.running, trainer.run_ended, trainer.status = True, False, "training"
    trainer.stop_reason = trainer.stopped_by = None
    trainer.saved_by_hand.clear()
    trainer.moment.begin_run()
    trainer.hooks.reopen()
    trainer.hooks.guard.begin(options.seed or 0, lambda: trainer.moment.step, cuda_devices_of(trainer.model))
    return trainer.hooks.desk.watch(lambda incident: record_incident(trainer, incident))


def prepare(trainer: Trainer, resume: str | Path | None) -> None:
    """What else comes before on_train_start: no old gradients, the right weights, a tried validation, one line."""
    options = trainer.options
    trainer.model.zero_grad(set_to_none=True)
    if not trainer.model.training:  # as a model from a hub comes; single modules left in eval mode stay so
        trainer.model.train()
    refuse_blind_plateau(trainer)
    if options.init_from:
        load_weights(trainer.model, options.init_from)
    if resume is not None:
        go_on_from(trainer, Path(resume))
    tell_doubts(trainer)
    if trainer.val_loaders and options.sanity_batches and resume is None:
        sanity_check(trainer, trainer.val_loaders, options.sanity_batches)
    if options.console:
        print(opening_line(trainer), flush=True)


def go_on_from(trainer: Trainer, path: Path) -> None:
    """Load the checkpoint that a path means. A run that was killed before its first one begins again, and says so."""
    if has_no_checkpoint_yet(path):
        logger.warning("%s has no checkpoint yet: the run begins again at its first step", path)
        trainer.note("begun_again", run=str(path))
        trainer.record.resumed(0, 0)
    else:
        trainer.load_checkpoint(path)
        abandon_later(trainer)


def abandon_later(trainer: Trainer) -> None:
    """What the run had reached beyond this point is not where it will come to."""
    if trainer.checkpoint_dir is not None:
        for moved in set_aside_later(trainer.checkpoint_dir, trainer.moment.steps_done):
            logger.warning("a checkpoint of a later step was set aside: %s", moved)
            trainer.note("checkpoint_abandoned", path=moved)


def tell_doubts(trainer: Trainer) -> None:
    """Say at the start, not after the loss, whose data could not be gone on with exactly, and who asked in vain."""
    for doubt in doubts_about(trainer.train_loaders) if trainer.run_dir is not None else []:
        logger.warning("resuming this run inside an epoch may not be exact: %s", doubt)
        trainer.note("resume_not_exact", why=doubt)
    for entry in trainer.hooks.entries():
        for target in (*entry.before, *entry.after):
            if target not in trainer.hooks:
                there = nearest(target, [name for name in trainer.hooks if name != entry.name])
                logger.warning("%r asks to run beside %r, which is not registered; %s", entry.name, target, there)


def in_words(error: BaseException) -> str:
    """What went wrong and, if it was one, in which hook."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("raised by hook")]
    return "; ".join([f"{type(error).__name__}: {error}".rstrip(": "), *notes])


def how_it_ended(trainer: Trainer, signals: Signals) -> tuple[str, str | None]:
    """Outcome and reason of a run that did not fail."""
    if signals.caught is not None:
        trainer.note("stop_requested", reason=signals.caught.name, by="signal")
        return "interrupted", signals.caught.name
    return ("completed", None) if trainer.stop_reason is None else ("stopped", stop_sentence(trainer))


def refuse_blind_plateau(trainer: Trainer) -> None:
    """A scheduler that waits for the validation loss would wait for ever."""
    plateau = any(isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau) for one in trainer.schedulers)
    if plateau and not (trainer.val_loaders and trainer.options.validate_every is not None):
        raise TrainingError("ReduceLROnPlateau waits for val/loss: give a validation loader and validate_every")


def fail(trainer: Trainer, error: BaseException) -> None:
    """The run failed: every hook hears it, and a checkpoint that is being written is finished."""
    trainer.status = "error"
    trainer.moment.exception = error
    trainer.record.event("exception", trainer.moment.step, error=in_words(error))
    try:
        if heard := trainer.hooks.fire.on_exception:
            heard(trainer.moment)
    finally:
        trainer.background.finish_after(error)


def end(trainer: Trainer, outcome: str, reason: str | None) -> None:
    """on_train_end, hooks closed, record closed, one line on the console that hides nothing."""
    moment = trainer.moment
    moment.reason = reason or outcome
    moment.release_graph()
    if trainer.loop.batches is not None:
        trainer.loop.batches.close()
    trainer.note_non_finite(_read(trainer.loop.losses.take_non_finite))
    try:
        if heard := trainer.hooks.fire.on_train_end:
            heard(moment)
    finally:
        trainer.hooks.close()
        trainer.background = BackgroundSaves(trainer)  # lets go of the memory that the last one copied to
        trainer.record.extend(trainer.loop.unrecorded)
        trainer.loop.unrecorded.clear()
        costs = trainer.hooks.costs()
        trainer.record.close(outcome, reason, hook_list(trainer), costs, counters(trainer))
        trainer.hooks.guard.end()
        moment.resumed = False  # the next run of this trainer is another matter
        if trainer.options.console:
            print(closing_line(trainer, outcome, reason), flush=True)


def _read(count: Any) -> int:
    try:
        return int(count())
    except RuntimeError:
        return 0  # the device is gone; the failure itself is on record


def hook_list(trainer: Trainer) -> list[dict[str, Any]]:
    """Every hook with its status, for the record; a parameter is not copied, for it may be a model or hold a lock."""
    return [field_values(hook) for hook in trainer.hooks.list_hooks()]


def counters(trainer: Trainer) -> dict[str, Any]:
    """What the run came to."""
    moment = trainer.moment
    return {
        "step": moment.steps_done,
        "epoch": moment.epoch,
        "batches": moment.batches,
        "tokens_seen": moment.tokens_seen,
        **({"loader_batches": trainer.loader_batches} if len(trainer.train_loaders) > 1 else {}),
        "seconds": round(moment.seconds, 3),
        "skipped_steps": trainer.skipped_steps,
        "failed_saves": trainer.failed_saves,
        "non_finite_losses": trainer.non_finite_losses,
        "hook_failures": trainer.hook_failures,
    }


def record_incident(trainer: Trainer, incident: Incident) -> None:
    """Failures, switched-off and overruled hooks belong into events.jsonl; those of hooks removed since count too."""
    trainer.hook_failures += incident.kind == "failed"
    error = None if incident.error is None else f"{type(incident.error).__name__}: {incident.error}"
    trainer.record.event(
        f"hook_{incident.kind}",
        incident.step,
        hook=incident.hook,
        on=incident.event,
        message=incident.message,
        error=error,
    )


def stop_sentence(trainer: Trainer) -> str:
    """'stopped by early_stopping: val/loss has not improved …'"""
    return f"stopped by {trainer.stopped_by or 'request_stop'}: {trainer.stop_reason}"


def opening_line(trainer: Trainer) -> str:
    options, length = trainer.options, epoch_length(trainer.train_loaders)
    steps = _counted(options.max_steps, "step") if options.max_steps is not None else ""
    epochs = _counted(options.epochs, "epoch") if options.epochs is not None else ""
    of = f" of {_counted(length, 'batch')}" if length is not None and epochs else ""
    assumed = " (give max_epochs or max_steps for more)" if options.max_epochs is None and not steps else ""
    where = f" → {shown_path(trainer.record.path)}" if trainer.record.path is not None else ""
    length_of_run = " or ".join(filter(None, [steps, epochs + of]))
    return f"run {trainer.record.run_id}: {length_of_run} on {trainer.device}{assumed}{where}"


def closing_line(trainer: Trainer, outcome: str, reason: str | None) -> str:
    count = counters(trainer)
    why = f" ({redact_text(reason)})" if reason else ""  # an exception's words, which may quote a secret
    words = [f"{outcome}{why}: {_counted(count['step'], 'step')} in {count['seconds']:.1f} s"]
    for key, text in (
        ("hook_failures", "hook failure"),
        ("non_finite_losses", "non-finite loss"),
        ("skipped_steps", "skipped step"),
        ("failed_saves", "failed save"),
    ):
        if count[key]:
            words.append(_counted(count[key], text))
    off = [hook.name for hook in trainer.hooks.list_hooks() if not hook.enabled and hook.failures]
    if off:
        words.append(f"switched off: {', '.join(off)}")
    return ", ".join(words)


def _counted(count: int, noun: str) -> str:
    plural = {"batch": "batches", "non-finite loss": "non-finite losses"}.get(noun, f"{noun}s")
    return f"{count} {noun if count == 1 else plural}"


def shown_path(path: Path) -> str:
    """A path as one would type it here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
