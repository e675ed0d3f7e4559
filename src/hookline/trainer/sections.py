"""What a checkpoint holds: collect the sections from a trainer, and restore a trainer from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hookline._names import load_plain_state_dict, plain_state_dict
from hookline.checkpoints.find import find_checkpoint
from hookline.checkpoints.frozen import fill_in_frozen
from hookline.checkpoints.store import SavedCheckpoint
from hookline.core.failures import raise_if_quit
from hookline.errors import CheckpointError, error_text
from hookline.record.provenance import config_hash
from hookline.run.hook_state import hooks_state, load_hooks_state
from hookline.run.rng import restore_rng, rng_state
from hookline.trainer.data.loader_state import restore_loader_states, restore_source_states, source_states
from hookline.trainer.rank_sections import like_weights, read_sections

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer


SAME_SECTIONS = ("optimizers", "schedulers", "scaler", "progress", "counts", "hook_names", "frozen")
"""Sections that all ranks have alike, shards of tensors aside; rank 0 saves them."""


def collect_sections(trainer: Trainer) -> dict[str, Any]:
    """Return the sections of a checkpoint; those of hooks are encoded already."""
    scaler, batches = trainer.engine.scaler, trainer.epochs.reader
    of_hooks = hooks_state(trainer)
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
        "position": trainer.position(),
        "loaders": {
            "train": source_states(trainer.train_loaders),
            "val": source_states(trainer.val_loaders),
            "own": batches.end_states() if trainer.progress.epoch_over and batches is not None else {},
        },
        "losses": trainer.stats.state_dict(),
        "counts": {**trainer.run_status.state_dict(), **_stop(trainer)},
        **of_hooks,
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


def restore_sections(trainer: Trainer, saved: SavedCheckpoint) -> None:
    """Restore weights, optimizers, counters, random streams and hooks."""
    sections = read_sections(trainer, saved)
    for what, present in (("optimizers", trainer.optimizers), ("schedulers", trainer.schedulers)):
        then, now = len(sections[what]), len(present)
        if then != now:
            raise CheckpointError(f"the checkpoint has {then} {what}, this run has {now}: they must match")
    # So that a run that cannot continue there changes nothing; without a run, the weights may be all that is wanted.
    if trainer.running and (position := sections["position"]) is not None:
        reader = trainer.epochs.make_reader(sections["progress"]["epoch"])
        reader.check(position, sections["progress"]["batch_idx"] + 1)
    _load_model(trainer.model, sections)
    for optimizer, state in zip(trainer.optimizers, sections["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    for scheduler, state in zip(trainer.schedulers, sections["schedulers"], strict=True):
        scheduler.load_state_dict(state)
    if trainer.engine.scaler is not None and sections.get("scaler"):
        trainer.engine.scaler.load_state_dict(sections["scaler"])
    trainer.progress.load_state_dict(sections["progress"], sections["position"])
    trainer.agreement.restored()
    trainer.epochs.reader = None
    trainer.stats.load_state_dict(sections["losses"])
    trainer.event_args.forget_step()
    trainer.run_status.load_state_dict(sections["counts"])
    load_hooks_state(trainer, sections)
    restore_source_states(trainer.train_loaders, sections["loaders"]["train"])
    restore_source_states(trainer.val_loaders, sections["loaders"]["val"])
    restore_loader_states(trainer.train_loaders, sections["loaders"]["own"])
    trainer.train_loaders.idle_states.clear()  # they are of a later time
    restore_rng(sections["rng"])


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
