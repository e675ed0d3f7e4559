"""Begin and end a run: the record is opened before the first step, and closed whatever happens."""

from __future__ import annotations

import atexit
import sys
from bdb import BdbQuit
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

import torch

from hookline import __version__, _device
from hookline._console import logger, print_line
from hookline._fs import relative_to_here
from hookline._terminal import can_redraw
from hookline.checkpoints.store import set_aside_later
from hookline.core.entry import Entry
from hookline.core.failures import Incident, hook_notes
from hookline.errors import ConfigError, RankError, RecordError, TrainingError, add_note, error_text, nearest
from hookline.rank_watch import WatchedRun
from hookline.ranks import compare, on_ranks
from hookline.record.labels import Labels, read_labels
from hookline.record.provenance import git_state
from hookline.record.redaction import redact_text, redacted_log
from hookline.record.sinks import SinkHandle
from hookline.record.strict_json import field_values
from hookline.trainer.checkpointing import has_no_checkpoint_yet, lineage_of, load_weights, pending_stop, run_directory
from hookline.trainer.data.loader_state import resume_warnings
from hookline.trainer.data.loaders import epoch_length
from hookline.trainer.non_finite import LossWatch, non_finite_parameters
from hookline.trainer.parallel import kind_of_parallel
from hookline.trainer.rng import seed_rank
from hookline.trainer.run_state import SIGNAL
from hookline.trainer.signals import SignalHandler
from hookline.trainer.validation import sanity_check

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

Result = TypeVar("Result")

_SECONDS_BETWEEN_LINES = 30.0  # where nothing can be redrawn: often enough for a log file, and not too long a file
_ALL_ALIKE = (
    "all ranks need the same; what is to differ, such as a path, is made in the hook from trainer.ranks.rank, and a "
    "hook that is to run on some of them has ranks="
)


@contextmanager
def run_context(trainer: Trainer, resume: str | Path | None, fork: bool = False) -> Iterator[SignalHandler]:
    """Begin a run before the block and end it afterwards; yields what handles its signals.

    Fires on_train_start before the block, on_exception if it fails, and on_train_end always; closes the record always.

    Args:
        trainer: The trainer.
        resume: A run or a checkpoint to resume from.
        fork: Whether to continue as a new run.
    """
    with trainer.ranks.watch(_watched(trainer), trainer.options.rank_timeout):
        _begin(trainer, resume, fork)
        with _begun_run(trainer, resume) as signals:
            yield signals
    signals.exit()


@contextmanager
def _begun_run(trainer: Trainer, resume: str | Path | None) -> Iterator[SignalHandler]:
    """Run the block between on_train_start and on_train_end; the record is open."""
    # From here on everything is recorded.
    stop_recording_incidents = trainer.hooks.failures.subscribe(partial(_record_incident, trainer))
    watch = trainer.record.add_own_sink(LossWatch(trainer))
    report: SinkHandle | None = None
    outcome, reason = "completed", None
    saves = trainer.checkpoint_dir is not None and not trainer.options.fast_dev_run
    ended = ExitStack()
    with ended, SignalHandler(trainer.stop_on_signal, trainer.prints, saves) as signals, redacted_log():
        try:
            with ExitStack() as during_training:
                ended.callback(_add_console(trainer))
                _open_hooks(trainer)
                if trainer.options.deterministic:
                    before = torch.are_deterministic_algorithms_enabled()
                    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
                    during_training.callback(torch.use_deterministic_algorithms, before, warn_only=warn_only)
                    torch.use_deterministic_algorithms(True)
                check = partial(_check_loader_schedule, trainer)
                during_training.callback(trainer.hooks.add_registration_check(check))
                _prepare(trainer, resume)
                report = _add_report(trainer)
                if handler := trainer.hooks.slots.on_train_start:
                    handler(trainer.event_args)
                trainer.agreement.settle()
                try:
                    yield signals
                except Exception as failed:
                    if signals.worker_error is not None:  # it says why the worker died
                        add_note(failed, error_text(signals.worker_error))
                    # A loader that a validation or a hook reads is another matter: weights may be exchanged.
                    # Other ranks would wait for a rank that ends without its step.
                    if signals.caught is None or not trainer.loop.reading or trainer.ranks.world_size > 1:
                        raise
                    _leave_loader(trainer, failed)
                trainer.agreement.settle()
                signals.adopt(trainer.run_status.signal)
                trainer.checkpointer.finish()  # so that checkpoint hooks know what is saved
                _save_last_step(trainer)
                trainer.checkpointer.save_requested()
                trainer.checkpointer.finish()
            trainer.run_status.close(failed=False)
            if signals.caught is not None:
                outcome, reason = "interrupted", signals.caught.name
                rank = next((stop.rank for stop in trainer.run_status.stops if stop.by == SIGNAL), 0)
                trainer.note("stop_requested", reason=reason, by=SIGNAL, **({"rank": rank} if rank else {}))
            elif trainer.stop_reason is not None:
                outcome, reason = "stopped", _why_stopped(trainer)
        except BaseException as raised:
            error = trainer.ranks.explain(ending_error(raised))
            outcome, reason = outcome_of(error), _reason(trainer, error)
            _fail(trainer, error, reason)
            if signals.caught is None or not _is_of_loader(error):
                if isinstance(error, RankError) and error is not raised:
                    raise error from raised
                if isinstance(raised, BdbQuit):
                    raise error from None
                raise
            # The workers of a validation got the signal, too. The run resumes from its last checkpoint.
            outcome, reason = "interrupted", signals.caught.name
        finally:
            signals.waits_for = "everything is written"
            try:
                _end(trainer, outcome, reason)
            finally:
                trainer.hooks.rng_guard.end()
                watch.remove()
                if report is not None:
                    report.remove()
                stop_recording_incidents()
                trainer.run_status.end()


def _add_report(trainer: Trainer) -> SinkHandle | None:
    """Let rank 0 keep what report.html shows; after the run was resumed, because later steps are then discarded."""
    if not trainer.options.report or trainer.record.path is None or trainer.ranks.rank:
        return None
    from hookline.report.sink import ReportSink

    try:
        return trainer.record.add_sink(ReportSink(trainer.record, trainer.progress.steps_done))
    except Exception as error:  # no report is worth a run
        logger.warning("this run will have no report: %s", error_text(error))
        return None


def _why_stopped(trainer: Trainer) -> str:
    """Say who has stopped the run and why; the rank, if it was another than 0."""
    reason, by, rank = trainer.run_status.stops[0]
    return f"stopped by {by or 'request_stop'}{f' on rank {rank}' if rank else ''}: {reason}"


def ending_error(raised: BaseException) -> BaseException:
    """Return what a run ends with, given what reached its end.

    A generator turns a StopIteration into a RuntimeError; the StopIteration is returned. Quitting the debugger raises
    an Exception, but is the user's interruption: hooks have turned it into KeyboardInterrupt; here it came from other
    code.
    """
    if isinstance(raised, BdbQuit):
        return KeyboardInterrupt("quit in the debugger")
    if isinstance(raised, RuntimeError) and isinstance(raised.__cause__, StopIteration):
        return raised.__cause__
    return raised


def keep_stop_iteration(call: Callable[[], Result]) -> Result:
    """Call a function that runs the loop, and raise a StopIteration of a hook or of the training code as it was."""
    try:
        return call()
    except RuntimeError as error:
        if not isinstance(stopped := ending_error(error), StopIteration):
            raise
    raise stopped  # outside of the except clause, which would set its context


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
    """Compare the ranks, seed and open the record."""
    options = trainer.options
    if trainer.ranks.world_size > 1:
        compare(trainer.ranks, _compared(trainer), _ALL_ALIKE)
    _check_run(trainer)  # before the run has a directory and a name
    # Ranks that share each batch draw alike.
    seed_rank(options.seed, trainer.ranks.rank if trainer.engine.averages else 0)
    run_dir = None if resume is None or fork else run_directory(Path(resume))
    lineage = None
    if resume is not None and run_dir is None:
        lineage = trainer.ranks.first(partial(lineage_of, Path(resume)))
    source = None if lineage is None or resume is None else run_directory(Path(resume))
    trainer.begin_run(run_dir, _hook_list(trainer), lineage, _labels(trainer, source))


def _check_run(trainer: Trainer) -> None:
    """Let the hooks that declare it check the run on their ranks; what one of them raises ends all ranks."""
    failed: Exception | None = None
    try:
        for entry in trainer.hooks.entries():
            if getattr(entry.hook, "checks_run", False) and entry.is_on(trainer.ranks):
                entry.hook.check_run(trainer)
    except Exception as error:
        failed = error
    problems = trainer.ranks.gather(failed and error_text(failed))
    if failed is not None:
        raise failed
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise RankError(f"rank {rank}: {problem}")


def _labels(trainer: Trainer, source: Path | None) -> Labels:
    """Return the labels of a new run: those of its options; tags and notes that they lack are those of its source.

    A name is not inherited, because it names one run.
    """
    options, inherited = trainer.options, Labels()
    if source is not None:
        try:
            inherited = read_labels(source)
        except RecordError as error:
            logger.warning("the new run gets no tags and notes: %s", error)
    tags = inherited.tags if options.tags is None else tuple(options.tags)
    return Labels(options.name, tags, inherited.notes if options.notes is None else options.notes)


def _compared(trainer: Trainer) -> dict[str, Any]:
    """Return what must be the same on all ranks, for comparison."""
    parameters = {hook.name: hook.parameters for hook in trainer.hooks.list_hooks()}
    hooks = {
        entry.name: {
            "enabled": entry.enabled_for_ranks,
            "schedule": str(entry.schedule),
            "policy": entry.policy,
            "parameters": {
                key: value for key, value in parameters[entry.name].items() if isinstance(value, (int, float, str))
            },
            "place": place,
        }
        for place, entry in enumerate(trainer.hooks.entries())
    }
    config = {key: value for key, value in trainer.describe().items() if key not in ("trainer", "hooks")}
    return {
        "the options": asdict(trainer.options),
        "the config": config,
        "the hooks": hooks,
        "the metrics": sorted(trainer.validation_metrics),
        "the loaders": {"training": list(trainer.train_loaders), "validation": list(trainer.val_loaders)},
        "the number of optimizers and schedulers": [len(trainer.optimizers), len(trainer.schedulers)],
        "the parameters": {name: list(param.shape) for name, param in trainer.params.items()},
        "the versions": {"hookline": __version__, "torch": torch.__version__, "git": git_state(Path.cwd())},
    }


def _add_console(trainer: Trainer) -> Callable[[], None]:
    """Register a `console_log` hook for this run, unless the user has one.

    Returns:
        A function that removes it.
    """
    names = [*trainer.hooks, *(getattr(type(hook), "name", None) for hook in trainer.hooks.hooks)]
    if not trainer.options.console or "console_log" in names:  # also under another name, or switched off
        return lambda: None
    # Rank 0 decides for all, because its output counts and the ranks must have the same hooks.
    if trainer.ranks.first(lambda: can_redraw(sys.stdout)):
        others = [entry for entry in trainer.hooks.entries() if entry.origin != "default"]
        return trainer.hooks.register("console_log", origin="default", costs=bool(others)).remove
    return trainer.hooks.register("console_log", origin="default", costs=False, pause=_SECONDS_BETWEEN_LINES).remove


def _open_hooks(trainer: Trainer) -> None:
    """Set up the hooks that the last run closed, and protect the random streams from all of them."""
    trainer.hooks.reopen()
    if any(getattr(entry.hook, "collective", False) for entry in trainer.hooks.entries()):
        trainer.ranks.group  # noqa: B018 - made here, where all ranks are
    devices = _device.device_indices([*trainer.model.parameters(), *trainer.model.buffers()])
    trainer.hooks.rng_guard.begin(trainer.options.seed or 0, lambda: trainer.progress.step, devices, trainer.ranks.rank)


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
    trainer.checkpointer.find_frozen()
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
    if trainer.prints:
        print_line(opening_line(trainer))


def _resume(trainer: Trainer, path: Path) -> None:
    """Load the checkpoint that a path means; a run that was killed before its first checkpoint starts again."""
    if trainer.ranks.first(partial(has_no_checkpoint_yet, path)):
        logger.warning("%s has no checkpoint yet: the run starts again at its first step", path)
        trainer.note("begun_again", run=str(path))
        trainer.record.resume_at(0, 0)
        return
    found = trainer.checkpointer.load(path)
    if trainer.checkpoint_dir is not None:  # later checkpoints are not states that the resumed run will reach
        set_aside = partial(set_aside_later, trainer.checkpoint_dir, trainer.progress.steps_done)
        for moved in trainer.ranks.first(set_aside):
            logger.warning("moved a checkpoint of a later step away: %s", moved)
            trainer.note("checkpoint_abandoned", path=moved)
        if found.absolute().parent == trainer.checkpoint_dir.absolute():  # else it is another run's
            trainer.checkpointer.mark_saved()
    if (stop := trainer.ranks.first(partial(pending_stop, trainer))) is not None:
        reason, by = stop
        words = "the run was killed while it stopped (%s: %s), so it ends here; resume it again to train on"
        logger.warning(words, by or "request_stop", reason)
        trainer.request_stop(reason, by)


def _check_loader_schedule(trainer: Trainer, entry: Entry) -> None:
    """Reject a hook whose schedule counts the batches of a loader that does not exist."""
    for name in entry.schedule.loaders:
        if name not in trainer.train_loaders:
            why = f"{entry.schedule}: no training loader is named {name!r}; {nearest(name, trainer.train_loaders)}"
            raise ConfigError(f"{entry.name}.every", why)


# ---- the end ---------------------------------------------------------------------------------------------------------


def _fail(trainer: Trainer, error: BaseException, described: str) -> None:
    """Fire on_exception, and finish a checkpoint that is being written."""
    trainer.ranks.failed(trainer.progress.step, described)
    trainer.run_status.close(failed=True)
    trainer.event_args.exception = error
    trainer.record.event("exception", trainer.progress.step, error=described)
    try:
        trainer.loop.settle_failed_step()
    except Exception as another:  # the device is gone, for instance
        logger.warning("while the run was ending: %s", error_text(another))
    try:
        if handler := trainer.hooks.slots.on_exception:
            handler(trainer.event_args)
    finally:
        trainer.checkpointer.finish_after(error)


def _save_last_step(trainer: Trainer) -> None:
    """Let checkpoint hooks save the last step, if they have to or if the run has no checkpoint.

    What a signal requests is enough for all, and what is requested otherwise for those that need not save the end.
    """
    saves = trainer.checkpointer
    for entry in trainer.hooks.entries():
        save, save_last = (getattr(entry.hook, name, None) for name in ("save_last_step", "save_last"))
        if save is None or not entry.enabled or not entry.built_in or saves.needs_save:
            continue
        if save_last or not saves.requests:
            save(trainer)


def _is_of_loader(error: BaseException) -> bool:
    """Return whether an exception was raised while a DataLoader was read."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
    return any(name.startswith("torch.utils.data.") for name in modules)


def _leave_loader(trainer: Trainer, error: Exception) -> None:
    """End a run that a signal has stopped without the batches that its loader can no longer give.

    A signal to the process group ends the loader's workers, too. If their batches were needed to complete a step, the
    run was never in a state that it can resume from exactly, and it is saved as after a failure in a step.
    """
    logger.warning("the run is stopping, and a loader has failed: %s", error_text(error))
    trainer.note("loader_failed", error=error_text(error))
    if trainer.loop.is_in_step:
        trainer.run_status.close(failed=False)


def _end(trainer: Trainer, outcome: str, reason: str | None) -> None:
    """Fire on_train_end, close hooks and record, and print a line that hides nothing."""
    args, hooks, loop, bad_weights = trainer.event_args, trainer.hooks, trainer.loop, ""
    with suppress(Exception):  # another rank has failed, which is found again where the ranks meet
        bad_weights = _bad_weights(trainer, outcome)
        loop.record_non_finite_losses(_if_device_answers(loop.stats.take_non_finite, 0))
    args.end_run(bad_weights or reason or outcome)
    failure = _first_failure(partial(handler, args) if (handler := hooks.slots.on_train_end) else None)
    failure = failure or _first_failure(partial(_save_at_end, trainer))
    closing = _first_failure(hooks.close)
    failure = failure or closing
    if failure is not None:
        trainer.ranks.failed(trainer.progress.step, _describe_error(failure))

    def look_again() -> None:  # a hook may have restored good weights at the end
        nonlocal bad_weights
        bad_weights = bad_weights and _bad_weights(trainer, outcome)

    failure = failure or _first_failure(look_again, partial(_collect_failures, trainer), trainer.ranks.meet)
    if failure is not None and outcome in ("completed", "stopped"):
        failure = trainer.ranks.explain(failure)
        outcome, reason = outcome_of(failure), _reason(trainer, failure)
        trainer.run_status.close(failed=True)
        trainer.record.event("exception", trainer.progress.step, error=reason)
    elif isinstance(failure, Exception):  # it does not replace the exception or the signal that ends the run
        logger.warning("while the run was ending: %s", _describe_error(failure))
        if args.exception is not None:
            add_note(args.exception, f"then, while the run was ending: {_describe_error(failure)}")
        failure = None
    if bad_weights and failure is None:
        trainer.note("non_finite_weights", message=bad_weights)
        outcome, reason = "non_finite", "; ".join(filter(None, [bad_weights, reason]))
    trainer.checkpointer.close()
    loop.write_unrecorded()
    trainer.change_audit.finish()
    trainer.record.close(outcome, reason, _hook_list(trainer), hooks.costs(), _counters(trainer))
    if trainer.prints:
        print_line(closing_line(trainer, outcome, reason))
    if failure is not None:
        raise failure


def _save_at_end(trainer: Trainer) -> None:
    """Write what hooks of several ranks have asked to save in on_train_end, once all ranks know of it."""
    if trainer.ranks.act_together and trainer.status != "error":
        trainer.agreement.settle()
        trainer.checkpointer.save_requested()
        trainer.checkpointer.finish()


def _collect_failures(trainer: Trainer) -> None:
    """Count the failures of hooks on other ranks, where they are no error: rank 0 writes the run's summary."""
    own = {hook.name: hook.failures for hook in trainer.hooks.list_hooks() if hook.failures}
    for rank, failures in trainer.ranks.gather([trainer.ranks.rank, own]):  # after a failure, of this rank alone
        if rank != trainer.ranks.rank:
            for name, count in failures.items():
                trainer.run_status.failed_on_ranks.setdefault(name, []).append(rank)
                trainer.run_status.count("hook_failures", count)


def _bad_weights(trainer: Trainer, outcome: str) -> str:
    """Say which trained parameters are not finite, in the shard of any rank; empty if all are, or if the run failed.

    Waits for the device and for all ranks, also after a signal, which one of them may have received alone.
    """
    own: list[str] = []
    if outcome in ("completed", "stopped"):
        own = _if_device_answers(partial(non_finite_parameters, trainer.params), own)
    counts = trainer.ranks.total([name in own for name in trainer.params])
    names = [name for name, count in zip(trainer.params, counts, strict=True) if count]
    return f"{len(names)} of {len(trainer.params)} parameters are not finite, first {names[0]!r}" if names else ""


def _if_device_answers(measure: Callable[[], Result], otherwise: Result) -> Result:
    """Return what a function measures, or `otherwise` if it raises.

    At the end the device may be gone on one rank, which must take part in what follows: the others wait for it.
    """
    try:
        return measure()
    except Exception:
        return otherwise


def _first_failure(*calls: Callable[[], object] | None) -> BaseException | None:
    """Make all calls, whatever they raise, and return what was raised first."""
    raised: BaseException | None = None
    for call in filter(None, calls):
        try:
            call()
        except BaseException as error:
            raised = error if raised is None else raised
    return raised


def outcome_of(error: BaseException) -> str:
    """Return the outcome of a run that ends with an exception."""
    return "failed" if isinstance(error, Exception) else "interrupted"


def _describe_error(error: BaseException) -> str:
    """Return what went wrong and, if it was one, in which hook."""
    return "; ".join([error_text(error), *hook_notes(error)])


def _reason(trainer: Trainer, error: BaseException) -> str:
    """Return why a run ends for its record: what went wrong, and with several ranks on which one."""
    alone, described = trainer.ranks.world_size == 1, _describe_error(error)
    return described if alone or isinstance(error, RankError) else f"rank {trainer.ranks.rank}: {described}"


# ---- the end of a process that is blocked ----------------------------------------------------------------------------


def _watched(trainer: Trainer) -> WatchedRun:
    """Return what the other ranks' watch needs from a run."""
    progress, args, hooks = trainer.progress, trainer.event_args, trainer.hooks

    def position() -> list[int]:
        return [progress.step, progress.batches, max(args.batch_idx, 0)]  # the last one moves in a validation, too

    def fire_on_exception(error: RankError) -> None:
        trainer.ranks.failed(progress.step, error_text(error))
        if args.exception is None and trainer.running:
            args.exception = error
            if handler := hooks.slots.on_exception:
                handler(args)

    def close_record(error: RankError) -> None:
        reason = error_text(error)
        if "record" in vars(trainer) and trainer.running:
            trainer.loop.write_unrecorded()
            costs, counters = hooks.costs(wait=False), _counters(trainer)
            trainer.record.close("failed", reason, _hook_list(trainer), costs, counters, wait=False)
        if trainer.prints:
            print_line(closing_line(trainer, "failed", reason))

    last_calls = fire_on_exception, close_record
    return WatchedRun(position, hooks.hook_in, last_calls)


# ---- what is recorded and printed ------------------------------------------------------------------------------------


def _hook_list(trainer: Trainer) -> list[dict[str, Any]]:
    """Return every hook with its status; parameters are not copied, because one may be a model or hold a lock."""
    elsewhere = trainer.run_status.failed_on_ranks
    hooks = [field_values(hook) for hook in trainer.hooks.list_hooks()]
    for hook in hooks:
        if hook["name"] in elsewhere:
            hook["failed_on_ranks"] = elsewhere[hook["name"]]
    return hooks


def _counters(trainer: Trainer) -> dict[str, Any]:
    """Return the counters that run.json ends with."""
    progress, status = trainer.progress, trainer.run_status
    return {
        "step": progress.steps_done,
        "epoch": progress.epoch,
        "batches": progress.batches,
        "tokens_seen": progress.tokens,
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
    error = None if incident.error is None else error_text(incident.error)
    what = {"hook": incident.hook, "on": incident.event, "message": incident.message, "error": error}
    trainer.record.event(f"hook_{incident.kind}", incident.step, **what)


def opening_line(trainer: Trainer) -> str:
    """Return the line that is printed before the first step."""
    options, length = trainer.options, epoch_length(trainer.train_loaders)
    steps = _counted(options.max_steps, "step") if options.max_steps is not None else ""
    epochs = _counted(options.epochs, "epoch") if options.epochs is not None else ""
    of = f" of {_counted(length, 'batch')}" if length is not None and epochs else ""
    assumed = " (give max_epochs or max_steps for more)" if options.max_epochs is None and not steps else ""
    length_of_run = " or ".join(filter(None, [steps, epochs + of]))
    where = "" if trainer.record.path is None else f" → {relative_to_here(trainer.record.path)}"
    done, resumed = trainer.progress.steps_done, ""
    if trainer.event_args.resumed:
        outcomes = [attempt.get("outcome") for attempt in trainer.record.run["attempts"][:-1]]
        had_completed = " of a run that had completed" if "completed" in outcomes[-1:] else ""
        resumed = f", resumed at step {done}{had_completed}"
        if trainer.total_steps is not None and done >= trainer.total_steps:
            assumed = " (nothing is left to train; give a larger max_steps or max_epochs to train on)"
    on = f"{trainer.device}"
    if trainer.ranks.world_size > 1:
        kind = {"ddp": "DDP", "fsdp2": "FSDP2", "tensor": "tensor parallel"}[kind_of_parallel(trainer.model)]
        on += f", {trainer.ranks.world_size} processes ({kind})"
    return f"run {trainer.record.run_id}{resumed}: {length_of_run} on {on}{assumed}{where}"


def closing_line(trainer: Trainer, outcome: str, reason: str | None) -> str:
    """Return the line that is printed after the run: outcome, duration, and everything that went wrong."""
    count = _counters(trainer)
    # The text of an exception may quote a secret.
    why = f" ({redact_text(reason.removeprefix('stopped '))})" if reason else ""
    named = outcome.replace("non_finite", "non-finite weights")
    words = [f"{named}{why}: {_counted(count['step'], 'step')} in {count['seconds']:.1f} s"]
    for key, noun in (
        ("hook_failures", "hook failure"),
        ("non_finite_losses", "non-finite loss"),
        ("skipped_steps", "skipped step"),
        ("failed_saves", "failed save"),
    ):
        if count[key]:
            words.append(_counted(count[key], noun))
    saved = trainer.checkpointer.last_step
    if saved is not None and saved < count["step"]:
        hooks = [entry.hook for entry in trainer.hooks.entries() if entry.enabled]
        could_save = any(not getattr(hook, "save_last", True) for hook in hooks)
        in_order = outcome in ("completed", "stopped", "non_finite")
        remedy = "; save_last: true saves the end, too" if could_save and in_order else ""
        unsaved = _counted(count["step"] - saved, "step")
        words.append(f"{unsaved} after the last checkpoint (step {saved}{remedy})")
    disabled = [hook.name for hook in trainer.hooks.list_hooks() if not hook.enabled and hook.failures]
    if disabled:
        words.append(f"switched off: {', '.join(disabled)}")
    for name, ranks in trainer.run_status.failed_on_ranks.items():
        words.append(f"{name} failed on {on_ranks(ranks)}")
    if trainer.change_audit.summary:
        words.append(trainer.change_audit.summary)
    return ", ".join(words)


def _counted(count: int, noun: str) -> str:
    plural = {"batch": "batches", "non-finite loss": "non-finite losses"}.get(noun, f"{noun}s")
    return f"{count} {noun if count == 1 else plural}"
