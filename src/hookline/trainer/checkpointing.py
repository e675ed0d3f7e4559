"""Decide what a checkpoint holds: collect it from a trainer, write it, and restore a trainer from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hookline._console import logger
from hookline._fs import explain, refuse_link
from hookline._names import load_plain_state_dict, plain_state_dict
from hookline._tensors import is_sharded, map_tensors
from hookline.checkpoints.format import Encoder, Section, encode_section
from hookline.checkpoints.frozen import Fingerprints, fill_in_frozen, frozen_parameters
from hookline.checkpoints.saves import Alike, OneSave, Save, SharedSave, on_all, without_alike
from hookline.checkpoints.snapshot import HostMemory
from hookline.checkpoints.store import SavedCheckpoint, list_checkpoints, newest_good, read_manifest
from hookline.core.failures import hook_notes, raise_if_quit
from hookline.errors import CheckpointError, add_note, error_text
from hookline.record.json_lines import read_jsonl
from hookline.record.provenance import config_hash
from hookline.trainer.data.loader_state import restore_loader_states, restore_source_states, source_states
from hookline.trainer.rank_sections import alike_tensors, like_weights, read_sections
from hookline.trainer.rng import restore_rng, rng_state

if TYPE_CHECKING:
    from hookline.core.registry import HookRegistry
    from hookline.trainer.event_args import EventArgs
    from hookline.trainer.trainer import Trainer

SaveName = str | Callable[[], str] | None

ALIKE = ("optimizers", "schedulers", "scaler", "progress", "counts", "hook_names", "frozen")
"""Sections that all ranks have alike, shards of tensors aside; rank 0 saves them."""


class SavedArgs:
    """The current event arguments, except for the counters: those are of the step that was saved."""

    def __init__(self, args: EventArgs) -> None:
        self.step, self.epoch, self.tokens_seen = args.step, args.epoch, args.tokens_seen
        self._args = args

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name)


@dataclass(frozen=True)
class PendingSave:
    """A checkpoint that is being written while training continues, or was written and is not reported yet."""

    name: str
    args: SavedArgs
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
                    self._pending = PendingSave(name, SavedArgs(trainer.event_args), save, written, self._state)
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
        alike: Alike = {**dict.fromkeys(ALIKE), "model": alike_tensors(trainer.model)}

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
        in_step, other = trainer.loop.is_in_step, trainer.event_args.is_other_batch
        if (in_step or other) and trainer.status == "training":
            what = "validation" if other else "step"
            raise CheckpointError(f"half a {what} cannot be saved; trainer.save() waits for the end of the {what}")
        if trainer.status == "error" and trainer.ranks.world_size > 1:
            raise CheckpointError("a run on several ranks that has failed cannot be saved: they may be at other steps")
        self.finish_unless_failed()
        trainer.agreement.settle()  # what all ranks have counted is saved
        trainer.loop.flush()
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
        """Return the sections of a checkpoint, and note the hooks that start without a state when it is loaded."""
        trainer, hooks = self._trainer, self._trainer.hooks
        states = _encode_states(hooks, {entry.name: entry.state for entry in hooks.entries()})
        chain_states = trainer.chain.states
        update_states = _encode_states(hooks, {name: partial(chain_states.get, name) for name in chain_states})
        sections = _collect(trainer, states.section(), update_states.section())
        if self._frozen is not None:
            unsaved = self.unsaved_parameters()
            sections["frozen"] = {name: now for name, now in unsaved.items() if name in sections["model"]}
            sections["model"] = {name: value for name, value in sections["model"].items() if name not in unsaved}
        stateless = [
            entry.name
            for entry in hooks.entries()
            if entry.name not in states.items.keys() | update_states.items.keys()
            and (not entry.built_in or "state_dict" in entry.failures.in_a_row)
        ]
        if stateless and trainer.run_status.first_time(f"hooks_without_state: {stateless}"):
            trainer.note("hooks_without_state", hooks=stateless)
        return sections

    def _step_name(self) -> str:
        return f"step-{self._trainer.progress.steps_done:08d}"

    def _report_saved(self, path: Path, args: EventArgs | SavedArgs) -> None:
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
        name, problems = trainer.ranks.first(partial(_find_whole, Path(path)))
        found = Path(name)
        for problem in problems:
            trainer.note("checkpoint_damaged", problem=problem, instead=str(found))
        self.find_frozen()
        try:
            _restore(trainer, SavedCheckpoint(found, verify=False))
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


# ---- the sections of a checkpoint ------------------------------------------------------------------------------------


def _collect(trainer: Trainer, hooks: Section, update_state: Section) -> dict[str, Any]:
    """Return the sections of a checkpoint; those of hooks are encoded already."""
    scaler, batches = trainer.engine.scaler, trainer.loop.batches
    between_epochs = trainer.progress.epoch_over and batches is not None
    return {
        "model": _state_of(trainer.model, "the model", plain_state_dict),
        "optimizers": [_state_of(optimizer, "an optimizer") for optimizer in trainer.optimizers],
        # A scheduler's functions belong to the code.
        "schedulers": [
            {key: value for key, value in _state_of(scheduler, "a scheduler").items() if not callable(value)}
            for scheduler in trainer.schedulers
        ],
        "scaler": scaler.state_dict() if scaler is not None else None,
        "progress": trainer.progress.state_dict(),
        "rng": rng_state(),
        "position": trainer.loop.position(),
        "loaders": {
            "train": source_states(trainer.train_loaders),
            "val": source_states(trainer.val_loaders),
            "own": batches.end_states() if between_epochs and batches is not None else {},
        },
        "losses": trainer.loop.stats.state_dict(),
        "counts": {**trainer.run_status.state_dict(), **_stop(trainer)},
        "hooks": hooks,
        "hook_names": list(trainer.hooks),
        "update_state": update_state,
        "streams": trainer.hooks.rng_guard.state_dict(),
    }


def _state_of(part: Any, what: str, read: Callable[[Any], Any] = methodcaller("state_dict")) -> dict[str, Any]:
    """Return the state_dict of a part of the run; if it raises, the error names the part."""
    try:
        state: dict[str, Any] = read(part)
    except Exception as error:
        where = f"state_dict() of {what} ({type(part).__name__})"
        raise_if_quit(error, where)
        raise CheckpointError(f"{where} raised {error_text(error)}") from error
    return state


def _encode_states(hooks: HookRegistry, states: Mapping[str, Callable[[], Any]]) -> Encoder:
    """Encode states of hooks; one that cannot be read or saved is left out, unless its hook's policy ends the run.

    Args:
        hooks: The hooks.
        states: Functions that return the states, by the hooks' names.
    """
    encoder = Encoder(with_shards=True)
    for name, read in states.items():
        if name in hooks:
            hooks.failures.state_of(hooks.entry(name), partial(encoder.add, name, read))
    return encoder


def _stop(trainer: Trainer) -> dict[str, Any]:
    """Return the stop that was requested, if any, for a run that is killed before it ends."""
    if trainer.run_status.lasting_stop is None or not trainer.running:
        return {}
    reason, by, _ = trainer.run_status.lasting_stop
    attempt, terms = len(trainer.record.run["attempts"]), _stop_terms(trainer, by)
    return {"stop": {"run_id": trainer.run_id, "attempt": attempt, "reason": reason, "by": by, "under": terms}}


def _stop_terms(trainer: Trainer, by: str | None) -> str:
    """Return the hash of the settings that a stop depends on: the run's length, and the hook's plain parameters.

    Only whether they are the same is of interest, and one of them may be a secret.
    """
    hooks = [hook.parameters for hook in trainer.hooks.list_hooks() if hook.name == by]
    parameters = {key: value for one in hooks for key, value in one.items() if isinstance(value, (int, float, str))}
    options = trainer.options
    return config_hash({"max_steps": options.max_steps, "max_epochs": options.max_epochs, "hook": parameters})


def pending_stop(trainer: Trainer) -> tuple[str, str | None] | None:
    """Return reason and hook of the stop that the resumed run was killed in, None if it is to train on.

    That is if the stop was carried out: this attempt or a later one was closed, with any outcome but "interrupted", so
    that resuming asks for more; if its terms were changed, for instance `max_steps` or the hook's `patience`; or if
    this is another run.
    """
    stop = trainer.run_status.loaded_stop
    if stop is None or stop["run_id"] != trainer.run_id or stop["under"] != _stop_terms(trainer, stop["by"]):
        return None
    attempts = trainer.record.run["attempts"][stop["attempt"] - 1 : -1]
    outcomes = [one.get("outcome") for one in attempts if isinstance(one, dict)]  # None: the attempt was killed
    was_carried_out = any(outcome not in (None, "interrupted") for outcome in outcomes)
    return None if was_carried_out else (stop["reason"], stop["by"])


def _restore(trainer: Trainer, saved: SavedCheckpoint) -> None:
    """Restore weights, optimizers, counters, random streams and hooks."""
    sections = _with_present_names(trainer, read_sections(trainer, saved))
    for what, present in (("optimizers", trainer.optimizers), ("schedulers", trainer.schedulers)):
        then, now = len(sections[what]), len(present)
        if then != now:
            raise CheckpointError(f"the checkpoint has {then} {what}, this run has {now}: they must match")
    # So that a run that cannot continue there changes nothing; without a run, the weights may be all that is wanted.
    if trainer.running and (position := sections["position"]) is not None:
        trainer.loop.batches_of_epoch(sections["progress"]["epoch"]).check(
            position, sections["progress"]["batch_idx"] + 1
        )
    _load_model(trainer.model, sections)
    for optimizer, state in zip(trainer.optimizers, sections["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    for scheduler, state in zip(trainer.schedulers, sections["schedulers"], strict=True):
        scheduler.load_state_dict(state)
    if trainer.engine.scaler is not None and sections.get("scaler"):
        trainer.engine.scaler.load_state_dict(sections["scaler"])
    trainer.progress.load_state_dict(sections["progress"], sections["position"])
    trainer.loop.restore(sections["losses"])
    trainer.event_args.forget_step()
    trainer.run_status.load_state_dict(sections["counts"])
    # Update hooks meet gradients on the device, so their state goes there, too; shards are there.
    trainer.chain.restore(
        map_tensors(lambda one: one if is_sharded(one) else one.to(trainer.device), sections["update_state"])
    )
    _restore_hooks(trainer, sections)
    trainer.hooks.rng_guard.load_state_dict(sections["streams"])
    restore_source_states(trainer.train_loaders, sections["loaders"]["train"])
    restore_source_states(trainer.val_loaders, sections["loaders"]["val"])
    restore_loader_states(trainer.train_loaders, sections["loaders"]["own"])
    trainer.train_loaders.idle_states.clear()  # they are of a later time
    restore_rng(sections["rng"])


def _with_present_names(trainer: Trainer, sections: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's sections with the names that hooks have now, where version 0.1 named them otherwise."""
    names = trainer.hooks.former_names()

    def renamed(states: dict[str, Any]) -> dict[str, Any]:
        return {names.get(name, name): state for name, state in states.items()}

    changed = {key: renamed(sections[key]) for key in ("hooks", "update_state")}
    changed["streams"] = {**sections["streams"], "hooks": renamed(sections["streams"]["hooks"])}
    return {**sections, **changed, "hook_names": [names.get(name, name) for name in sections["hook_names"]]}


def _restore_hooks(trainer: Trainer, sections: dict[str, Any]) -> None:
    """Restore the state of every hook by name, and record how the hooks differ from the checkpoint's.

    The present hooks and their order count: a new hook starts without a state, and the state of a removed one is left
    out; renaming a hook is both.
    """
    for kind, names in trainer.hooks.load_state_dict(sections["hooks"]).items():
        for name in names:
            trainer.record.event("hook_state", trainer.progress.step, hook=name, problem=kind)
    before, now = sections["hook_names"], list(trainer.hooks)
    if before != now:
        added, removed = [one for one in now if one not in before], [one for one in before if one not in now]
        moved = [one for one in now if one in before] != [one for one in before if one in now]
        trainer.record.event("hooks_changed", trainer.progress.step, added=added, removed=removed, reordered=moved)
        with_state = [one for one in removed if sections["update_state"].get(one) or sections["hooks"].get(one)]
        if with_state:
            logger.warning(
                "the checkpoint's state of %s is not used: this run has no such hook (a renamed hook starts without)",
                ", ".join(map(repr, with_state)),
            )
    trainer.hooks.replan(restored=trainer.progress)


# ---- finding checkpoints ---------------------------------------------------------------------------------------------


def find_checkpoint(path: Path) -> tuple[Path, list[str]]:
    """Return the checkpoint that a path means, of several the newest whole one, and what is wrong with newer ones."""
    if os.path.lexists(path / "manifest.json"):
        return path, []
    directory = checkpoints_of(path)
    found, problems = newest_good(directory)
    problems = [*_missing(directory, found), *problems]
    for problem in problems:
        logger.warning("skipped a damaged checkpoint: %s", problem)
    if found is None:
        damaged = f" ({len(problems)} damaged)" if problems else ""
        raise CheckpointError(f"no whole checkpoint in {directory}{damaged}")
    return found, problems


def _find_whole(path: Path) -> tuple[str, list[str]]:
    """Return the checkpoint that a path means, after every byte was verified, and what is wrong with newer ones."""
    found, problems = find_checkpoint(path)
    return str(SavedCheckpoint(found).path), problems


def has_no_checkpoint_yet(path: Path) -> bool:
    """Return whether a path is a run that has not written a checkpoint; damaged and missing ones count as written."""
    directory = path / "checkpoints"
    is_run = os.path.lexists(path / "run.json")
    return is_run and not list_checkpoints(directory) and _newest_recorded(directory) is None


def _missing(directory: Path, found: Path | None) -> list[str]:
    """Return a sentence about the newest checkpoint that the record names, if it is newer than `found` and gone.

    Retention never deletes the newest one, so that another program did.
    """
    recorded = _newest_recorded(directory)
    if recorded is None:
        return []
    step, path = recorded
    at = -1 if found is None else read_manifest(found)["meta"].get("step")
    if path in list_checkpoints(directory) or not isinstance(at, int) or at >= step:
        return []
    what = "is a link" if path.is_symlink() else "is empty" if path.is_dir() else "is missing"
    return [f"{path}: {what}, although the run has saved it"]


def _newest_recorded(directory: Path) -> tuple[int, Path] | None:
    """Return step and path of the newest checkpoint of which events.jsonl says that it was saved, if any."""
    newest: tuple[int, Path] | None = None
    events = directory.parent / "events.jsonl"
    for event in read_jsonl(events)[0] if directory.name == "checkpoints" and events.is_file() else []:
        kind, step, path = event.get("kind"), event.get("step"), event.get("path")
        if not isinstance(step, int) or not isinstance(path, str):
            continue
        if kind == "checkpoint_saved" and Path(path).parent.name == directory.name:
            newest = step, directory / Path(path).name  # the run may have been moved since
        elif kind == "checkpoint_loaded" and newest is not None and newest[0] > step:  # it was set aside then
            newest = None
    return newest


def lineage_of(path: Path) -> dict[str, Any]:
    """Return run, step and path of the checkpoint that a new run starts from."""
    found, _ = find_checkpoint(path)
    meta = read_manifest(found)["meta"]
    return {"run_id": meta.get("run_id"), "step": meta.get("step"), "checkpoint": str(found.absolute())}


def checkpoints_of(path: Path) -> Path:
    """Return the directory that holds a run's checkpoints, or the given one itself. Raises an error for a link."""
    inside = path / "checkpoints"
    try:
        refuse_link(inside)
    except OSError as error:
        raise CheckpointError(explain(inside, error, "read")) from error
    return inside if inside.is_dir() else path


def run_directory(path: Path) -> Path | None:
    """Return the run that a path to resume from belongs to, None for a checkpoint outside of a run.

    The run's id is the name of its directory, whatever a link to it is called.
    """
    places = (path, *path.absolute().parents[:2])
    return next((place.resolve() for place in places if os.path.lexists(place / "run.json")), None)


def load_weights(model: torch.nn.Module, path: str | Path) -> None:
    """Load the weights of a checkpoint and nothing else."""
    saved = SavedCheckpoint(find_checkpoint(Path(path))[0])
    if "model" not in saved.names:
        has = ", ".join(saved.names)
        raise CheckpointError(f"{saved.path} has no weights: it has the sections {has}, and no model")
    names = [name for name in ("model", "frozen") if name in saved.names]
    _load_model(model, {name: saved.section(name, like=like_weights(model)) for name in names})


def _load_model(model: torch.nn.Module, sections: Mapping[str, Any]) -> None:
    """Load the weights; the frozen ones that a checkpoint was saved without have to be in the model."""
    weights = fill_in_frozen(model, sections["model"], sections.get("frozen", {}))
    load_plain_state_dict(model, weights)
