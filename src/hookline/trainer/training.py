"""Everything that only our trainer does around a run: opening line, ranks, seeds, signals, resuming, sanity check.

Other hosts do none of this, because each item would change a foreign run.
"""

from __future__ import annotations

import atexit
import os
import sys
from bdb import BdbQuit
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import count
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hookline._console import logger, print_line
from hookline._fs import describe_process, relative_to_here
from hookline._terminal import can_redraw
from hookline._text import counted
from hookline._words import nearest
from hookline.checkpoints.find import Found, find_checkpoint, has_no_checkpoint_yet, run_directory
from hookline.checkpoints.store import set_aside_later
from hookline.core.base import hook_attribute
from hookline.core.entry import Entry
from hookline.errors import ConfigError, RankError, RecordError, TrainingError, add_note, error_text
from hookline.rank_watch import WatchedRun
from hookline.ranks import host
from hookline.record.labels import Labels, read_labels
from hookline.record.outcome import Outcome
from hookline.record.record import Record
from hookline.run.rng import seed_rank
from hookline.runs.find import KILLED, RunFiles
from hookline.trainer.data.loader_state import resume_warnings
from hookline.trainer.parallel import kind_of_parallel
from hookline.trainer.schedules import warn_of_ends
from hookline.trainer.sections import pending_stop
from hookline.trainer.signals import SignalHandler
from hookline.trainer.validation import sanity_check

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

_SECONDS_BETWEEN_LINES = 30.0  # where nothing can be redrawn: often enough for a log file, without making it too long
AUTO = "auto"
UNFINISHED = (KILLED, Outcome.INTERRUPTED, Outcome.FAILED)
_numbers = count(1)  # Numbers the runs of a process: a script that is restarted makes the same runs in the same order.


@contextmanager
def training(trainer: Trainer, resume: str | Path | None, fork: bool = False) -> Iterator[None]:
    """Begin a run before the block and end it afterwards, with the exception or the signal that ends the block.

    Args:
        trainer: The trainer.
        resume: A run or a checkpoint to resume from, by its path or name; "auto" for the newest unfinished run like it.
        fork: Whether to continue as a new run.
    """
    is_auto = resume == AUTO
    if is_auto and fork:
        raise TrainingError("resume='auto' continues a run, and fork=True begins one: name the run to fork")
    with trainer.ranks.watch(_watched(trainer), trainer.options.rank_timeout):  # before anything waits for other ranks
        start = None if resume is None or is_auto else trainer.find_saved(resume)
        if start is None:
            trainer.find_initial_weights()
        launch = _describe_launch(trainer)
        if (run := _continued_run(trainer, launch, start)) is not None:
            start, fork = run, False
        elif is_auto:
            start = _unfinished_run(trainer)
        trainer.resume_from = _open(trainer, start, fork, launch)
        saves = trainer.checkpoint_dir is not None and not trainer.options.fast_dev_run
        with SignalHandler(trainer.agreement.request_end, trainer.prints, saves) as signals:
            trainer.signals = signals
            try:
                _add_console(trainer)
                trainer.begin()
                try:
                    yield
                except Exception as failed:
                    if not _ends_with_signal(trainer, failed):
                        raise
                    _leave_loader(trainer, failed)
                trainer.finish()
            except BaseException as raised:
                signals.waits_for = "everything is written"
                # A user who quits the debugger, outside of any hook, interrupts the run.
                quits = isinstance(raised, BdbQuit)
                error = trainer.ranks.explain(KeyboardInterrupt("quit in the debugger") if quits else raised)
                # The workers of a validation got the signal, too. The run resumes from its last checkpoint.
                is_loader = signals.caught is not None and _is_of_loader(error)
                trainer.end(error, signals.caught.name if signals.caught is not None and is_loader else None)
                if not is_loader:
                    if error is raised:
                        raise
                    raise error from raised if isinstance(error, RankError) else None
            else:
                signals.adopt(trainer.run_status.signal)
                signals.waits_for = "everything is written"
                trainer.end(signal=None if signals.caught is None else signals.caught.name)
    signals.exit()


@cache
def unfinished_runs() -> WeakSet[Generator[Any, Any, Any]]:
    """Return the iterators of runs to close when the interpreter exits, while a record can still be closed."""
    runs: WeakSet[Generator[Any, Any, Any]] = WeakSet()

    def close_all() -> None:
        for run in list(runs):
            run.close()

    atexit.register(close_all)
    return runs


# ---- the beginning ---------------------------------------------------------------------------------------------------


def _open(trainer: Trainer, resume: Path | None, fork: bool, launch: dict[str, Any] | None) -> Path | Found | None:
    """Compare the ranks, check the run, seed, and open the record. An exception here ends no run yet.

    Returns:
        What to resume from. Rank 0 has found the checkpoint already if it begins a new run, whose lineage names it.
    """
    options, ranks = trainer.options, trainer.ranks
    trainer.agreement.before_run()
    trainer.check_run()  # before the run has a directory and a name
    # Ranks that share each batch draw the same random numbers.
    seed_rank(options.seed, trainer.engine.first_with_batch(ranks.rank))
    run_dir = None if resume is None or fork else run_directory(resume)
    lineage = source = None
    found: list[Found] = []
    if resume is not None and run_dir is None:
        lineage, source = ranks.first(partial(_find_source, resume, found)), run_directory(resume)
    record = _open_record(trainer, run_dir)
    hosts = ranks.gather(host())
    labels = _labels(trainer, source)
    hooks, training = trainer.describe_hooks(), trainer.describe_training()
    record.start(hooks, lineage=lineage, hosts=hosts, launch=launch, labels=labels, training=training)
    trainer.open(record)
    return found[0] if found else resume


def _find_source(resume: Path, found: list[Found]) -> dict[str, Any]:
    """Find the checkpoint that a new run starts from, and return its lineage."""
    found.append(find_checkpoint(resume))
    return found[0].lineage


def _open_record(trainer: Trainer, run_dir: Path | None) -> Record:
    """Open the run's record: rank 0 writes its files, and the others write what concerns them alone."""
    options, config, ranks = trainer.options, trainer.describe(), trainer.ranks
    opened: list[Record] = []

    def open_first() -> list[Any]:
        root, run_id = (options.output_dir, None) if run_dir is None else (run_dir.parent, run_dir.name)
        if options.record:
            opened.append(Record.on_disk(root, config=config, seed=options.seed, run_id=run_id))
        else:
            opened.append(Record.in_memory(config=config, seed=options.seed))
        return [opened[0].run_id, None if opened[0].path is None else str(opened[0].path)]

    run_id, path = ranks.first(open_first)
    if not opened:
        opened.append(Record.of_rank(ranks.rank, run_id, path, config=config, seed=options.seed))
    return trainer.agreement.record_of_ranks(opened[0])


def _labels(trainer: Trainer, source: Path | None) -> Labels:
    """Return the labels of a new run: those of its options; missing tags and notes are taken from its source.

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


def _check_loader_schedule(trainer: Trainer, entry: Entry) -> None:
    """Reject a hook whose schedule counts the batches of a loader that does not exist."""
    for name in entry.schedule.loaders:
        if name not in trainer.train_loaders:
            why = f"{entry.schedule}: no training loader is named {name!r}; {nearest(name, trainer.train_loaders)}"
            raise ConfigError(f"{entry.name}.every", why)


def _add_console(trainer: Trainer) -> None:
    """Register a `console_log` hook for this run, unless another hook, even a disabled one, shows the progress."""
    if not trainer.options.console or any(hook_attribute(hook, "shows_progress") for hook in trainer.hooks.hooks):
        return
    # Rank 0 decides for all, because its output counts and the ranks must have the same hooks.
    if trainer.ranks.first(lambda: can_redraw(sys.stdout)):
        parameters: dict[str, Any] = {"costs": any(entry.origin != "default" for entry in trainer.hooks.entries())}
    else:
        parameters = {"costs": False, "pause": _SECONDS_BETWEEN_LINES}
    trainer.until_end.callback(trainer.hooks.register("console_log", origin="default", **parameters).remove)


def prepare_training(trainer: Trainer, resume: Path | Found | None) -> dict[str, Any] | None:
    """Clear gradients, load weights, resume, warn, and try a validation, whose metrics are returned."""
    options = trainer.options
    if options.deterministic:
        before = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        trainer.until_end.callback(torch.use_deterministic_algorithms, before, warn_only=warn_only)
        torch.use_deterministic_algorithms(True)
    trainer.until_end.callback(trainer.hooks.add_registration_check(partial(_check_loader_schedule, trainer)))
    trainer.model.zero_grad(set_to_none=True)
    if not trainer.model.training:  # as models from a hub come; individual modules that are in eval mode stay in it
        trainer.model.train()
    needs_metric = any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in trainer.schedulers)
    if needs_metric and not trainer.validates_on_schedule:
        raise TrainingError("ReduceLROnPlateau needs val/loss: pass a validation loader and set validate_every")
    # A run that was killed before its first checkpoint starts over, like a new run.
    is_new = resume is None or trainer.ranks.first(partial(has_no_checkpoint_yet, resume))
    if is_new or options.trainable_only:  # only frozen weights may be missing from a checkpoint
        trainer.load_initial_weights()
    trainer.find_frozen()
    if resume is not None and is_new:
        logger.warning("%s has no checkpoint yet: the run starts again at its first step", resume)
        trainer.note("begun_again", run=str(resume))
        trainer.record.resume_at(0, 0)
    elif resume is not None:
        _resume(trainer, resume)
    warn_of_ends(trainer)
    is_cut = trainer.train_loaders.limit is not None
    for why in resume_warnings(trainer.train_loaders, is_cut) if trainer.run_dir is not None else []:
        logger.warning("resuming this run inside an epoch may not be exact: %s", why)
        trainer.note("resume_not_exact", why=why)
    for entry in trainer.hooks.entries():
        for target in (*entry.before, *entry.after):
            if target not in trainer.hooks:
                nearby = nearest(target, [name for name in trainer.hooks if name != entry.name])
                logger.warning("%r is ordered by %r, which is not registered; %s", entry.name, target, nearby)
    if trainer.val_loaders and options.sanity_batches and is_new:
        return sanity_check(trainer, trainer.val_loaders, options.sanity_batches)
    return None


def _resume(trainer: Trainer, source: Path | Found) -> None:
    """Load the checkpoint that a path means or that was found, and end the run if it was killed while it stopped."""
    trainer.restore(source)
    if trainer.checkpoint_dir is not None:
        trainer.record.defer(partial(_set_aside, trainer, trainer.checkpoint_dir, trainer.progress.steps_done))
    if (stop := trainer.ranks.first(partial(pending_stop, trainer))) is not None:
        reason, by = stop
        words = "the run was killed while it stopped (%s: %s), so it ends here; resume it again to continue training"
        logger.warning(words, by or "request_stop", reason)
        trainer.request_stop(reason, by)


def _set_aside(trainer: Trainer, directory: Path, step: int) -> None:
    """Move checkpoints of later steps away, because the resumed run will never reach their states."""
    for moved in trainer.ranks.first(partial(set_aside_later, directory, step)):
        logger.warning("moved a checkpoint of a later step away: %s", moved)
        trainer.note("checkpoint_abandoned", path=moved)


def opening_line(trainer: Trainer) -> str:
    """Return the line that is printed before the first step."""
    options, length = trainer.options, trainer.epoch_batches
    steps = counted(options.max_steps, "step") if options.max_steps is not None else ""
    epochs = counted(options.epochs, "epoch") if options.epochs is not None else ""
    of = f" of {counted(length, 'batch')}" if length is not None and epochs else ""
    assumed = " (pass max_epochs or max_steps to train longer)" if options.max_epochs is None and not steps else ""
    length_of_run = " or ".join(filter(None, [steps, epochs + of]))
    where = "" if trainer.record.path is None else f" → {relative_to_here(trainer.record.path)}"
    done, resumed = trainer.progress.steps_done, ""
    if trainer.event_args.resumed:
        outcomes = [attempt.get("outcome") for attempt in trainer.record.run["attempts"][:-1]]
        had_completed = " of a run that had completed" if "completed" in outcomes[-1:] else ""
        resumed = f", resumed at step {done}{had_completed}"
        if trainer.total_steps is not None and done >= trainer.total_steps:
            assumed = " (nothing is left to train; to train longer, pass a larger max_steps or max_epochs)"
    on = f"{trainer.device}"
    if trainer.ranks.world_size > 1:
        kind = {"ddp": "DDP", "fsdp2": "FSDP2", "tensor": "tensor parallel"}[kind_of_parallel(trainer.model)]
        on += f", {trainer.ranks.world_size} processes ({kind})"
    return f"run {trainer.record.run_id}{resumed}: {length_of_run} on {on}{assumed}{where}"


# ---- processes that a launcher starts again (torchrun --max-restarts) ------------------------------------------------


def _describe_launch(trainer: Trainer) -> dict[str, Any] | None:
    """Return the launch and the number of a run that begins, for run.json; None if no launcher would start it again.

    A later launch may have the same id, so launches are distinguished by the processes that started the ranks, one per
    machine.
    """
    launch, number = os.environ.get("TORCHELASTIC_RUN_ID"), next(_numbers)
    if launch is None:
        return None
    launchers = trainer.ranks.gather("{host}-{pid}-{started}".format(**describe_process(os.getppid())))
    return {"id": launch, "run": number, "launchers": sorted(set(launchers))}


def _continued_run(trainer: Trainer, launch: dict[str, Any] | None, resume: Path | None) -> Path | None:
    """Return the run that an earlier start of this launch began, or None; all ranks call this.

    It continues from its newest whole checkpoint, wherever the first start began.

    Args:
        trainer: The trainer.
        launch: The launch of the run that begins, if a launcher would start it again.
        resume: The run or checkpoint that the script asks to resume from.
    """
    if launch is None or not trainer.options.record:
        return None
    # Each machine counts the failures of its own processes.
    restarts = max(trainer.ranks.gather(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))))
    if restarts == 0:
        return None
    places = [Path(trainer.options.output_dir)]
    if resume is not None and (run := run_directory(resume)) is not None:
        places.append(run.parent)
    newest = trainer.ranks.first(partial(_find_launched, _runs_like(trainer, places), launch))
    then = f"continuing {newest}" if newest is not None else "starting a new run, because they had begun none like it"
    logger.warning("the processes were started again (restart %d): %s", restarts, then)
    return None if newest is None else Path(newest)


def _find_launched(runs: Iterator[RunFiles], launch: dict[str, Any]) -> str | None:
    """Return the newest run of a launch."""
    for run in runs:
        for attempt in run.run.get("attempts", []):
            begun_by = attempt.get("launch")
            if not isinstance(begun_by, dict) or any(begun_by.get(key) != launch[key] for key in ("id", "run")):
                continue
            launchers = begun_by.get("launchers")
            if isinstance(launchers, list) and any(launcher in launchers for launcher in launch["launchers"]):
                return str(run.path)
    return None


# ---- resume or start -------------------------------------------------------------------------------------------------


def _runs_like(trainer: Trainer, places: list[Path]) -> Iterator[RunFiles]:
    """Yield the runs in some directories that have the config of the run that begins, the newest of each first."""
    described = Record.in_memory(config=trainer.describe())
    described.start(hooks=[])  # computes the hash of the config as in run.json, without its secrets
    for place in places:
        for path in sorted(place.iterdir(), reverse=True) if place.is_dir() else []:
            try:
                run = RunFiles.read(path)
            except RecordError:
                continue
            if run.run.get("config_hash") == described.run["config_hash"]:
                yield run


def _unfinished_run(trainer: Trainer) -> Path | None:
    """Return the newest run with this config that was killed, was interrupted or has failed, and print its name.

    A run that another process is training does not count.
    """
    options = trainer.options
    if not options.record:
        return None

    def find() -> list[str] | None:
        runs = _runs_like(trainer, [Path(options.output_dir)])
        return next(([str(run.path), run.outcome] for run in runs if run.outcome in UNFINISHED), None)

    newest = trainer.ranks.first(find)
    if trainer.prints:
        continued = "no unfinished run of this config; starting a new one"
        if newest is not None:
            continued = f"{relative_to_here(Path(newest[0]))} ({newest[1]}) continues"
        print_line(f"resume or start, in {options.output_dir}/: {continued}")
    return None if newest is None else Path(newest[0])


# ---- the end ---------------------------------------------------------------------------------------------------------


def _ends_with_signal(trainer: Trainer, error: Exception) -> bool:
    """Return whether an exception comes from reading the next batch after a signal, which ends the run cleanly.

    A loader that a validation or a hook reads does not count, because the model's weights may be swapped at that time.
    The other ranks would wait for a rank that ends without completing its step.
    """
    signals = trainer.signals
    if signals.worker_error is not None:  # it explains why the worker died
        add_note(error, error_text(signals.worker_error))
    return signals.caught is not None and trainer.is_reading and trainer.ranks.world_size == 1


def _leave_loader(trainer: Trainer, error: Exception) -> None:
    """End a run that a signal has stopped, without the batches that its loader can no longer provide.

    A signal to the process group ends the loader's workers, too. If their batches were needed to complete a step, the
    run was never in a state that it can resume from exactly, and it is saved as after a failure in a step.
    """
    logger.warning("the run is stopping, and a loader has failed: %s", error_text(error))
    trainer.note("loader_failed", error=error_text(error))
    if trainer.is_in_step:
        trainer.run_status.close(failed=False)


def _is_of_loader(error: BaseException) -> bool:
    """Return whether an exception was raised while a DataLoader was read."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
    return any(name.startswith("torch.utils.data.") for name in modules)


# ---- the end of a process that is blocked ----------------------------------------------------------------------------


def _watched(trainer: Trainer) -> WatchedRun:
    """Return what the other ranks' watch needs from a run."""
    progress, args, hooks = trainer.progress, trainer.event_args, trainer.hooks

    def position() -> list[int]:
        return [progress.step, progress.batches, max(args.batch_idx, 0)]  # the last one advances in a validation, too

    def fire_on_exception(error: RankError) -> None:
        trainer.ranks.failed(progress.step, error_text(error))
        if args.exception is None and trainer.running:
            args.exception = error
            if handler := hooks.slots.on_exception:
                handler(args)

    return WatchedRun(position, hooks.hook_in, (fire_on_exception, trainer.end_blocked))
