"""What a checkpoint holds, and how a trainer is put back to it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hookline.checkpoints.files import newest_good, read_checkpoint, write_checkpoint
from hookline.errors import CheckpointError
from hookline.events.policy import logger
from hookline.trainer.loaders import generators_of, restore_generators
from hookline.trainer.rng import restore_rng, rng_state

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

PROGRESS = ("step", "steps_done", "epoch", "epoch_over", "batch_idx", "batches_before", "tokens_seen")


def save_checkpoint(trainer: Trainer, name: str | None = None) -> Path:
    """Write everything a run needs to go on; durable when this returns."""
    moment = trainer.moment
    directory = trainer.checkpoint_dir
    if directory is None:
        why = "this run keeps no record on disk (record=False)" if trainer.running else "there is no run yet"
        raise CheckpointError(f"{why}, so there is no directory to write a checkpoint to")
    name_stateless_hooks(trainer)
    meta = {"run_id": trainer.run_id, "step": moment.step, "epoch": moment.epoch}
    return write_checkpoint(directory, name or f"step-{moment.step:08d}", collect(trainer), meta)


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
        "progress": {**{name: getattr(moment, name) for name in PROGRESS}, "seconds": moment.seconds},
        "rng": rng_state(),
        "epoch_rng": moment.epoch_rng,
        "generators": [generator.get_state() for generator in generators_of(trainer.train_loaders)],
        "hooks": trainer.hooks.state_dict(),
        "update_state": trainer.chain.states,
    }


def load_checkpoint(trainer: Trainer, path: str | Path) -> Path:
    """Put a trainer back to a checkpoint: a checkpoint's directory, a run's, or one that holds checkpoints."""
    found = find_checkpoint(Path(path))
    sections, _ = read_checkpoint(found)
    restore(trainer, sections)
    return found


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means; of several, the newest that is whole, loudly if that is not the newest."""
    if (path / "manifest.json").exists():
        return path
    holder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found, problems = newest_good(holder)
    for problem in problems:
        logger.warning("a damaged checkpoint was passed over: %s", problem)
    if found is None:
        raise CheckpointError(f"no whole checkpoint in {holder}" + (f" ({len(problems)} damaged)" if problems else ""))
    return found


def run_directory(path: Path) -> Path | None:
    """The run that a path to resume from belongs to; None when it is a checkpoint that lies elsewhere."""
    return next((place for place in (path, *path.absolute().parents[:2]) if (place / "run.json").exists()), None)


def restore(trainer: Trainer, sections: dict[str, Any]) -> None:
    """Weights, optimizers, counters, random streams and hooks, each where it was."""
    trainer.model.load_state_dict(sections["model"])
    _check_count("optimizers", trainer.optimizers, sections["optimizers"])
    _check_count("schedulers", trainer.schedulers, sections["schedulers"])
    for optimizer, state in zip(trainer.optimizers, sections["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    for scheduler, state in zip(trainer.schedulers, sections["schedulers"], strict=True):
        scheduler.load_state_dict(state)
    if trainer.engine.scaler is not None and sections.get("scaler"):
        trainer.engine.scaler.load_state_dict(sections["scaler"])
    for name in PROGRESS:
        setattr(trainer.moment, name, sections["progress"][name])
    trainer.moment.elapsed_before = sections["progress"]["seconds"]
    trainer.moment.epoch_rng = sections["epoch_rng"]
    trainer.moment.forget_step()
    trainer.chain.states.update(_on(trainer.device, sections["update_state"]))
    for kind, names in trainer.hooks.load_state_dict(sections["hooks"]).items():
        for name in names:
            trainer.record.event("hook_state", trainer.moment.step, hook=name, problem=kind)
    trainer.hooks.replan(restored=trainer.moment)
    restore_generators(trainer.train_loaders, sections["generators"])
    restore_rng(sections["rng"])


def load_weights(model: torch.nn.Module, path: str | Path) -> None:
    """The weights of a checkpoint and nothing else."""
    sections, _ = read_checkpoint(find_checkpoint(Path(path)))
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
