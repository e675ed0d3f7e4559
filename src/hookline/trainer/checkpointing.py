"""What a checkpoint holds, and how a trainer is put back to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hookline.checkpoints.files import list_checkpoints, newest_good, read_checkpoint, write_checkpoint
from hookline.checkpoints.manifest import read_manifest
from hookline.errors import CheckpointError
from hookline.events.policy import logger
from hookline.trainer.positions import restore_own_states, restore_states, states_of
from hookline.trainer.rng import restore_rng, rng_state

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

COUNTS = ("skipped_steps", "non_finite_losses")
PROGRESS = ("step", "steps_done", "epoch", "epoch_over", "batch_idx", "batches_before", "tokens_seen", "loader_batches")


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is about to be written: what, and where."""

    directory: Path
    name: str
    sections: Mapping[str, Any]
    meta: Mapping[str, Any]

    def write(self) -> Path:
        """Write it; durable when this returns."""
        return write_checkpoint(self.directory, self.name, self.sections, self.meta)


def draft_checkpoint(trainer: Trainer, name: str | None) -> Draft:
    """Everything a run needs to go on, live; what was logged up to here is on disk.

    After a failure in the middle of a step the unfinished step is left out: whoever goes on from there begins behind
    the batch that failed. That is no point of the unbroken run's curve, so it lies where no resume finds it unasked.
    """
    refuse_half_a_step(trainer)
    trainer.background.make_way()
    trainer.loop.flush()
    trainer.record.settle()  # a resumed run repeats what came after its checkpoint, and nothing before
    moment = trainer.moment
    directory = trainer.checkpoint_dir if moment.step == moment.steps_done else exception_dir(trainer)
    if directory is None:
        why = "this run keeps no record on disk (record=False)" if trainer.running else "there is no run yet"
        raise CheckpointError(f"{why}, so there is no directory to write a checkpoint to")
    name_stateless_hooks(trainer)
    meta = {
        "run_id": trainer.run_id,
        "step": moment.steps_done,
        "epoch": moment.epoch,
        "lineage": trainer.record.lineage,
    }
    return Draft(directory, name or name_of_step(trainer), collect(trainer), meta)


def name_of_step(trainer: Trainer) -> str:
    """What a checkpoint is called that nobody names."""
    return f"step-{trainer.moment.steps_done:08d}"


def refuse_half_a_step(trainer: Trainer) -> None:
    """A checkpoint is made between two steps, or after a failure."""
    moment = trainer.moment
    under_way = moment.step != moment.steps_done or moment.set_aside is not None
    if under_way and trainer.status != "error":
        what = "step" if moment.set_aside is None else "validation"
        raise CheckpointError(
            f"a {what} is under way, and half a {what} cannot be saved; trainer.save() waits for its end"
        )


def save_as_told(trainer: Trainer, name: str | None) -> None:
    """Save, in the background if `async_save` says so; once the run is closing there is nothing to do meanwhile."""
    trainer.background.finish()  # one at a time
    with failing_as_told(trainer, trainer.moment.steps_done):
        if trainer.options.async_save and trainer.status == "training":
            trainer.background.begin(draft_checkpoint(trainer, name))
        else:
            trainer.save_checkpoint(name)


@contextmanager
def failing_as_told(trainer: Trainer, step: int) -> Iterator[None]:
    """On a failed save do what `on_save_error` says: end the run, or go on without, which is told and counted."""
    try:
        yield
    except CheckpointError as error:
        trainer.failed_saves += 1
        trainer.note("checkpoint_failed", step, error=str(error))
        if trainer.options.on_save_error == "stop":
            raise
        logger.warning("step %d has no checkpoint, training goes on: %s", step, error)


def tell_saved(trainer: Trainer, path: Path, moment: Any) -> None:
    """A checkpoint is durable: record and hooks hear of it, with the step of that moment."""
    trainer.moment.checkpoint_path = str(path)
    trainer.note("checkpoint_saved", moment.step, path=str(path))
    if heard := trainer.hooks.fire.on_checkpoint_save:
        heard(moment)


def exception_dir(trainer: Trainer) -> Path | None:
    """Where checkpoints go that a failure cut off in the middle of a step; None when nothing is written."""
    return None if trainer.run_dir is None else trainer.run_dir / "exception"


def name_stateless_hooks(trainer: Trainer) -> None:
    """Say once, at the first save of a run, which hooks start afresh when it is resumed."""
    if not trainer.named_stateless:
        trainer.named_stateless = True
        saved = trainer.hooks.state_dict()
        stateless = [entry.name for entry in trainer.hooks.entries() if not entry.built_in and entry.name not in saved]
        if stateless:
            trainer.note("hooks_without_state", hooks=stateless)


def collect(trainer: Trainer) -> dict[str, Any]:
    """The sections of a checkpoint."""
    moment, scaler = trainer.moment, trainer.engine.scaler
    return {
        "model": trainer.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedulers": [_plain(scheduler.state_dict()) for scheduler in trainer.schedulers],
        "scaler": scaler.state_dict() if scaler is not None else None,
        "progress": {
            **{name: getattr(moment, name) for name in PROGRESS},
            "step": moment.steps_done,  # the same, but for a failure in the middle of a step
            "seconds": moment.seconds,
        },
        "rng": rng_state(),
        "position": position_of(trainer),
        "loaders": loader_states(trainer),
        "losses": trainer.loop.losses.state_dict(),
        "counts": {name: getattr(trainer, name) for name in COUNTS},
        "hooks": trainer.hooks.state_dict(),
        "hook_names": list(trainer.hooks),
        "update_state": trainer.chain.states,
        "streams": trainer.hooks.guard.state_dict(),
    }


def position_of(trainer: Trainer) -> dict[str, Any] | None:
    """Where the loaders are inside an epoch; None between two."""
    batches, position = trainer.loop.batches, trainer.moment.position
    return position if batches is None or position is None else batches.position


def loader_states(trainer: Trainer) -> dict[str, Any]:
    """What the loaders' parts keep, and, between two epochs, what those that can say of themselves."""
    batches = trainer.loop.batches
    return {
        "train": states_of(trainer.train_loaders),
        "val": states_of(trainer.val_loaders),
        "own": batches.states_after() if trainer.moment.epoch_over and batches is not None else {},
    }


def load_checkpoint(trainer: Trainer, path: str | Path) -> Path:
    """Put a trainer back to a checkpoint: a checkpoint's directory, a run's, or one that holds checkpoints."""
    found, problems = find_checkpoint(Path(path))
    for problem in problems:
        trainer.note("checkpoint_damaged", problem=problem, instead=str(found))
    sections, _ = read_checkpoint(found)
    try:
        restore(trainer, sections)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{found} lacks something that a run needs to go on: {error!r}") from error
    return found


def find_checkpoint(path: Path) -> tuple[Path, list[str]]:
    """The checkpoint that a path means: of several the newest that is whole; and what is wrong with newer ones."""
    if (path / "manifest.json").exists():
        return path, []
    holder = holder_of(path)
    found, problems = newest_good(holder)
    for problem in problems:
        logger.warning("a damaged checkpoint was passed over: %s", problem)
    if found is None:
        raise CheckpointError(f"no whole checkpoint in {holder}" + (f" ({len(problems)} damaged)" if problems else ""))
    return found, problems


def has_no_checkpoint_yet(path: Path) -> bool:
    """Whether it is a run that has not written one; damaged ones count as written."""
    return (path / "run.json").exists() and not list_checkpoints(holder_of(path))


def lineage_of(path: Path) -> dict[str, Any]:
    """Where a run that begins from somebody's checkpoint comes from; whose own lineage is in that run's record."""
    found, _ = find_checkpoint(path)
    meta = read_manifest(found)["meta"]
    return {"run_id": meta.get("run_id"), "step": meta.get("step"), "checkpoint": str(found.absolute())}


def holder_of(path: Path) -> Path:
    """The directory that holds the checkpoints of a run, or the given one itself."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def run_directory(path: Path) -> Path | None:
    """The run that a path to resume from belongs to; None when it is a checkpoint that lies elsewhere."""
    return next((place for place in (path, *path.absolute().parents[:2]) if (place / "run.json").exists()), None)


def restore(trainer: Trainer, sections: dict[str, Any]) -> None:
    """Weights, optimizers, counters, random streams and hooks, each where it was."""
    _check_count("optimizers", trainer.optimizers, sections["optimizers"])
    _check_count("schedulers", trainer.schedulers, sections["schedulers"])
    trainer.model.load_state_dict(sections["model"])
    for optimizer, state in zip(trainer.optimizers, sections["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    for scheduler, state in zip(trainer.schedulers, sections["schedulers"], strict=True):
        scheduler.load_state_dict(state)
    if trainer.engine.scaler is not None and sections.get("scaler"):
        trainer.engine.scaler.load_state_dict(sections["scaler"])
    restore_progress(trainer, sections)
    trainer.chain.restore(_on(trainer.device, sections["update_state"]))
    restore_hooks(trainer, sections)
    trainer.hooks.guard.load_state_dict(sections["streams"])
    restore_states(trainer.train_loaders, sections["loaders"]["train"])
    restore_states(trainer.val_loaders, sections["loaders"]["val"])
    restore_own_states(trainer.train_loaders, sections["loaders"]["own"])
    trainer.train_loaders.between.clear()  # what they said later
    restore_rng(sections["rng"])


def restore_progress(trainer: Trainer, sections: dict[str, Any]) -> None:
    """The counters, the place in the data and the epoch's losses so far."""
    moment = trainer.moment
    for name in PROGRESS:
        setattr(moment, name, sections["progress"][name])
    moment.elapsed_before = sections["progress"]["seconds"]
    moment.position, trainer.loop.batches = sections["position"], None
    moment.forget_step()
    trainer.loop.losses.load_state_dict(sections["losses"])
    for name in COUNTS:
        setattr(trainer, name, sections["counts"][name])


def restore_hooks(trainer: Trainer, sections: dict[str, Any]) -> None:
    """Give every hook its state, in place and by name. What has changed since is recorded; the hooks of now are right.

    One that was added begins afresh, the state of one that was removed is left out (renaming is both), and another
    order is taken as it is now.
    """
    for kind, names in trainer.hooks.load_state_dict(sections["hooks"]).items():
        for name in names:
            trainer.record.event("hook_state", trainer.moment.step, hook=name, problem=kind)
    before, now = sections["hook_names"], list(trainer.hooks)
    if before != now:
        added, removed = [one for one in now if one not in before], [one for one in before if one not in now]
        moved = [one for one in now if one in before] != [one for one in before if one in now]
        trainer.record.event("hooks_changed", trainer.moment.step, added=added, removed=removed, reordered=moved)
        _tell_left_out([one for one in removed if sections["update_state"].get(one) or sections["hooks"].get(one)])
    trainer.hooks.replan(restored=trainer.moment)


def _tell_left_out(names: list[str]) -> None:
    if names:
        whose = ", ".join(map(repr, names))
        logger.warning(
            "the checkpoint's state of %s is left out: this run has no such hook (a renamed one begins afresh)", whose
        )


def load_weights(model: torch.nn.Module, path: str | Path) -> None:
    """The weights of a checkpoint and nothing else."""
    sections, _ = read_checkpoint(find_checkpoint(Path(path))[0])
    model.load_state_dict(sections["model"])


def _on(device: torch.device, tree: Any) -> Any:
    """A nested value with its tensors on a device: update hooks meet gradients there."""
    if isinstance(tree, torch.Tensor):
        return tree.to(device)
    if isinstance(tree, dict):
        return {key: _on(device, value) for key, value in tree.items()}
    return type(tree)(_on(device, value) for value in tree) if isinstance(tree, (list, tuple)) else tree


def _check_count(what: str, have: list[Any], saved: list[Any]) -> None:
    if len(have) != len(saved):
        raise CheckpointError(f"the checkpoint has {len(saved)} {what}, this run has {len(have)}: they must match")


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's state without its functions, which belong to the code and not to a checkpoint."""
    return {key: value for key, value in state.items() if not callable(value)}
