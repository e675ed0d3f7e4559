"""Begin and end a run: the record is opened before the first step, and closed whatever happens."""

from __future__ import annotations

import atexit
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from hookline import _device
from hookline.checkpoints.store import set_aside_later
from hookline.core.entry import Entry
from hookline.core.failures import Incident, logger
from hookline.errors import ConfigError, TrainingError, nearest
from hookline.record.redaction import redact_text, redacted_log
from hookline.record.strict_json import field_values
from hookline.trainer.checkpointing import (
    has_no_checkpoint_yet,
    lineage_of,
    load_weights,
    pending_stop,
    run_directory,
)
from hookline.trainer.data.loader_state import resume_warnings
from hookline.trainer.data.loaders import epoch_length
from hookline.trainer.rng import seed_everything
from hookline.trainer.signals import SignalHandler
from hookline.trainer.validation import sanity_check

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer


@contextmanager
def run_context(trainer: Trainer, resume: str | Path | None, fork: bool = False) -> Iterator[SignalHandler]:
    """Begin a run before the block and end it afterwards; yields what handles its signals.

    Fires on_train_start before the block, on_exception if it fails, and on_train_end always; closes the record always.

    Args:
        trainer: The trainer.
        resume: A run or a checkpoint to resume from.
        fork: Whether to continue as a new run.
    """
    _begin(trainer, resume, fork)
    # From here on everything is recorded.
    stop_recording_incidents = trainer.hooks.failures.subscribe(partial(_record_incident, trainer))
    outcome, reason = "completed", None
    with SignalHandler(trainer.stop_on_signal, trainer.options.console) as signals, redacted_log():
        try:
            with ExitStack() as during_training:
                if trainer.options.deterministic:
                    before = torch.are_deterministic_algorithms_enabled()
                    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
                    during_training.callback(torch.use_deterministic_algorithms, before, warn_only=warn_only)
                    torch.use_deterministic_algorithms(True)
                check = partial(_check_loader_schedule, trainer)
                during_training.callback(trainer.hooks.add_registration_check(check))
                _prepare(trainer, resume)
                if handler := trainer.hooks.slots.on_train_start:
                    handler(trainer.event_args)
                try:
                    yield signals
                except Exception as error:
                    if signals.worker_error is not None:  # it says why the worker died
                        error.add_note(str(signals.worker_error))
                    if signals.caught is None or not _is_of_loader(error):
                        raise
                    _leave_loader(trainer, error)
                _save_last_step(trainer)
                trainer.checkpointer.save_requested()
                trainer.checkpointer.finish()
            trainer.run_status.close(failed=False)
            if signals.caught is not None:
                outcome, reason = "interrupted", signals.caught.name
                trainer.note("stop_requested", reason=reason, by="signal")
            elif trainer.stop_reason is not None:
                outcome, reason = "stopped", f"stopped by {trainer.stopped_by or 'request_stop'}: {trainer.stop_reason}"
        except BaseException as error:
            outcome = "failed" if isinstance(error, Exception) else "interrupted"
            reason = _describe_error(error)
            _fail(trainer, error, reason)
            raise
        finally:
            try:
                _end(trainer, outcome, reason)
            finally:
                stop_recording_incidents()
                trainer.run_status.end()
    signals.exit()


@cache
def unfinished_steppers() -> WeakSet[Generator[Any, Any, Any]]:
    """Return the steppers to close when the interpreter exits, while closing a record is still possible."""
    steppers: WeakSet[Generator[Any, Any, Any]] = WeakSet()

    def close_all() -> None:
        for steps in list(steppers):
            steps.close()

    atexit.register(close_all)
    return steppers


# ---- the beginning ---------------------------------------------------------------------------------------------------


def _begin(trainer: Trainer, resume: str | Path | None, fork: bool) -> None:
    """Seed and open the record."""
    options, hooks = trainer.options, trainer.hooks
    if options.seed is not None:
        seed_everything(options.seed)
    run_dir = None if resume is None or fork else run_directory(Path(resume))
    lineage = lineage_of(Path(resume)) if resume is not None and run_dir is None else None
    trainer.begin_run(run_dir, _hook_list(trainer), lineage)
    hooks.reopen()
    devices = _device.device_indices([*trainer.model.parameters(), *trainer.model.buffers()])
    hooks.rng_guard.begin(options.seed or 0, lambda: trainer.progress.step, devices)


def _prepare(trainer: Trainer, resume: str | Path | None) -> None:
    """Do what else comes before on_train_start: clear gradients, load weights, warn, try a validation, print a line."""
    options = trainer.options
    trainer.model.zero_grad(set_to_none=True)
    if not trainer.model.training:  # as a model from a hub comes; single modules that are left in eval mode stay so
        trainer.model.train()
    plateau = any(isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau) for one in trainer.schedulers)
    if plateau and not (trainer.val_loaders and options.validate_every is not None):
        raise TrainingError("ReduceLROnPlateau waits for val/loss: give a validation loader and validate_every")
    if options.init_from:
        load_weights(trainer.model, options.init_from)
    if resume is not None:
        _resume(trainer, Path(resume))
    is_cut = trainer.train_loaders.limit is not None
    for why in resume_warnings(trainer.train_loaders, is_cut) if trainer.run_dir is not None else []:
        logger.warning("resuming this run inside an epoch may not be exact: %s", why)
        trainer.note("resume_not_exact", why=why)
    for entry in trainer.hooks.entries():
        for target in (*entry.before, *entry.after):
            if target not in trainer.hooks:
                nearby = nearest(target, [name for name in trainer.hooks if name != entry.name])
                logger.warning("%r is ordered by %r, which is not registered; %s", entry.name, target, nearby)
    measured = None
    if trainer.val_loaders and options.sanity_batches and resume is None:
        measured = sanity_check(trainer, trainer.val_loaders, options.sanity_batches)
    for entry in trainer.hooks.entries():
        if entry.enabled and entry.built_in and (check := getattr(entry.hook, "check_monitor", None)):
            check(trainer, measured)
    if options.console:
        print(opening_line(trainer), flush=True)


def _resume(trainer: Trainer, path: Path) -> None:
    """Load the checkpoint that a path means; a run that was killed before its first checkpoint starts again."""
    if has_no_checkpoint_yet(path):
        logger.warning("%s has no checkpoint yet: the run starts again at its first step", path)
        trainer.note("begun_again", run=str(path))
        trainer.record.resume_at(0, 0)
        return
    trainer.load_checkpoint(path)
    if trainer.checkpoint_dir is not None:  # later checkpoints are not states that the resumed run will reach
        for moved in set_aside_later(trainer.checkpoint_dir, trainer.progress.steps_done):
            logger.warning("moved a checkpoint of a later step away: %s", moved)
            trainer.note("checkpoint_abandoned", path=moved)
    if (stop := pending_stop(trainer)) is not None:
        reason, by = stop
        words = "the run was killed while it stopped (%s: %s), so it ends here; resume it again to train on"
        logger.warning(words, by or "request_stop", reason)
        trainer.request_stop(reason, by)


def _check_loader_schedule(trainer: Trainer, entry: Entry) -> None:
    """Reject a hook whose schedule counts the batches of a loader that does not exist."""
    for name in entry.schedule.loaders:
        if name not in trainer.train_loaders:
            why = f"{entry.schedule}: there is no training loader {name!r}; {nearest(name, trainer.train_loaders)}"
            raise ConfigError(f"{entry.name}.every", why)


# ---- the end ---------------------------------------------------------------------------------------------------------


def _fail(trainer: Trainer, error: BaseException, described: str) -> None:
    """Fire on_exception, and finish a checkpoint that is being written."""
    trainer.run_status.close(failed=True)
    trainer.event_args.exception = error
    trainer.record.event("exception", trainer.progress.step, error=described)
    try:
        trainer.loop.settle_failed_step()
    except Exception as another:  # the device is gone, for instance
        logger.warning("while the run was ending: %s: %s", type(another).__name__, another)
    try:
        if handler := trainer.hooks.slots.on_exception:
            handler(trainer.event_args)
    finally:
        trainer.checkpointer.finish_after(error)


def _save_last_step(trainer: Trainer) -> None:
    """Let checkpoint hooks save the last step of a run that has no checkpoint; one that is requested is enough."""
    saves = trainer.checkpointer
    for entry in trainer.hooks.entries():
        save = getattr(entry.hook, "save_last_step", None)
        if entry.enabled and entry.built_in and save is not None and not (saves.requests or saves.needs_save):
            save(trainer)


def _is_of_loader(error: Exception) -> bool:
    """Return whether an exception was raised while a DataLoader was read."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
    return any(module.startswith("torch.utils.data.") for module in modules)


def _leave_loader(trainer: Trainer, error: Exception) -> None:
    """End a run that a signal has stopped without the batches that its loader can no longer give.

    A signal to the process group ends the loader's workers, too. If their batches were needed to complete a step, the
    run was never in a state that it can resume from exactly, and it is saved as after a failure in a step.
    """
    logger.warning("the run is stopping, and a loader has failed: %s", error)
    trainer.note("loader_failed", error=f"{type(error).__name__}: {error}")
    if trainer.loop.is_in_step:
        trainer.run_status.close(failed=False)


def _end(trainer: Trainer, outcome: str, reason: str | None) -> None:
    """Fire on_train_end, close hooks and record, and print a line that hides nothing."""
    args, hooks, loop = trainer.event_args, trainer.hooks, trainer.loop
    args.end_run(reason or outcome)
    try:
        non_finite = loop.stats.take_non_finite()
    except Exception:  # the device is gone; the failure itself is recorded
        non_finite = 0
    loop.record_non_finite_losses(non_finite)
    try:
        if handler := hooks.slots.on_train_end:
            handler(args)
    finally:
        hooks.close()
        trainer.checkpointer.close()
        loop.write_unrecorded()
        trainer.record.close(outcome, reason, _hook_list(trainer), hooks.costs(), _counters(trainer))
        hooks.rng_guard.end()
        if trainer.options.console:
            print(closing_line(trainer, outcome, reason), flush=True)


def _describe_error(error: BaseException) -> str:
    """Return what went wrong and, if it was one, in which hook."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("raised by hook")]
    return "; ".join([f"{type(error).__name__}: {error}".rstrip(": "), *notes])


# ---- what is recorded and printed ------------------------------------------------------------------------------------


def _hook_list(trainer: Trainer) -> list[dict[str, Any]]:
    """Return every hook with its status; parameters are not copied, because one may be a model or hold a lock."""
    return [field_values(hook) for hook in trainer.hooks.list_hooks()]


def _counters(trainer: Trainer) -> dict[str, Any]:
    """Return the counters that run.json ends with."""
    progress, status = trainer.progress, trainer.run_status
    return {
        "step": progress.steps_done,
        "epoch": progress.epoch,
        "batches": progress.batches,
        "tokens_seen": progress.tokens_seen,
        **({"loader_batches": trainer.loader_batches} if len(trainer.train_loaders) > 1 else {}),
        "seconds": round(progress.seconds, 3),
        "skipped_steps": status.skipped_steps,
        "failed_saves": status.failed_saves,
        "non_finite_losses": status.non_finite_losses,
        "hook_failures": status.hook_failures,
    }


def _record_incident(trainer: Trainer, incident: Incident) -> None:
    """Write an incident to events.jsonl; failures are counted, also those of hooks that are removed later."""
    if incident.kind == "failed":
        trainer.run_status.count("hook_failures")
    error = None if incident.error is None else f"{type(incident.error).__name__}: {incident.error}"
    trainer.record.event(
        f"hook_{incident.kind}",
        incident.step,
        hook=incident.hook,
        on=incident.event,
        message=incident.message,
        error=error,
    )


def opening_line(trainer: Trainer) -> str:
    """Return the line that is printed before the first step."""
    options, length = trainer.options, epoch_length(trainer.train_loaders)
    steps = _counted(options.max_steps, "step") if options.max_steps is not None else ""
    epochs = _counted(options.epochs, "epoch") if options.epochs is not None else ""
    of = f" of {_counted(length, 'batch')}" if length is not None and epochs else ""
    assumed = " (give max_epochs or max_steps for more)" if options.max_epochs is None and not steps else ""
    length_of_run = " or ".join(filter(None, [steps, epochs + of]))
    path, here, where = trainer.record.path, Path.cwd(), ""
    if path is not None:
        where = f" → {path.relative_to(here) if path.is_relative_to(here) else path}"
    resumed = f", resumed at step {trainer.progress.steps_done}" if trainer.event_args.resumed else ""
    return f"run {trainer.record.run_id}{resumed}: {length_of_run} on {trainer.device}{assumed}{where}"


def closing_line(trainer: Trainer, outcome: str, reason: str | None) -> str:
    """Return the line that is printed after the run: outcome, duration, and everything that went wrong."""
    count = _counters(trainer)
    why = f" ({redact_text(reason)})" if reason else ""  # the text of an exception may quote a secret
    words = [f"{outcome}{why}: {_counted(count['step'], 'step')} in {count['seconds']:.1f} s"]
    for key, noun in (
        ("hook_failures", "hook failure"),
        ("non_finite_losses", "non-finite loss"),
        ("skipped_steps", "skipped step"),
        ("failed_saves", "failed save"),
    ):
        if count[key]:
            words.append(_counted(count[key], noun))
    disabled = [hook.name for hook in trainer.hooks.list_hooks() if not hook.enabled and hook.failures]
    if disabled:
        words.append(f"switched off: {', '.join(disabled)}")
    return ", ".join(words)


def _counted(count: int, noun: str) -> str:
    plural = {"batch": "batches", "non-finite loss": "non-finite losses"}.get(noun, f"{noun}s")
    return f"{count} {noun if count == 1 else plural}"
