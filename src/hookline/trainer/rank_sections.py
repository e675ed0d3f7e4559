"""Read a checkpoint as this rank needs it, however many ranks have saved it, and name what rank 0 saves for all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hookline._console import logger
from hookline._names import plain_parameters, plain_state_dict
from hookline.checkpoints.shards import Like
from hookline.checkpoints.store import SavedCheckpoint
from hookline.ranks import fingerprint
from hookline.run.epoch_stats import add_losses
from hookline.run.rng import rng_state, seed_everything

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

_OF_PARAMETER = re.compile(r"(\d+)\.state\.(\d+)\.")  # names of an optimizer's saved tensors


def alike_tensors(model: torch.nn.Module) -> list[str]:
    """Return the names of the parameters that are equal on all ranks: those of a DDP model. Buffers may differ."""
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return []
    return list(plain_parameters(model, remove_duplicate=False))


def read_sections(trainer: Trainer, saved: SavedCheckpoint) -> dict[str, Any]:
    """Return the sections of a checkpoint for this rank.

    If more or fewer ranks have saved it, each rank reads rank 0's sections, and `_share_out` replaces those that differ
    between ranks.
    """
    ranks = trainer.ranks
    is_same = saved.world_size == ranks.world_size
    forms: dict[str, Like] = {
        "model": like_weights(trainer.model),
        "optimizers": _like_optimizers(trainer.optimizers),
        **dict.fromkeys(("hooks", "update_state"), _like_named(trainer.model, saved)),
    }
    rank = ranks.rank if is_same else 0
    sections = {name: saved.section(name, rank, forms.get(name)) for name in saved.names}
    return sections if is_same else _share_out(trainer, saved, sections)


def _share_out(trainer: Trainer, saved: SavedCheckpoint, sections: dict[str, Any]) -> dict[str, Any]:
    """Turn rank 0's sections into those of this rank, for a checkpoint that more or fewer ranks have saved.

    A rank that existed then continues its random streams, and a new rank starts new ones. Rank 0 gets the losses of the
    epoch of all ranks, because every mean is taken over all ranks.
    """
    ranks, count = trainer.ranks, saved.world_size
    why = (
        f"the checkpoint was saved by {_processes(count)}, and this run has {_processes(ranks.world_size)}: weights, "
        "optimizers and hooks are the same, random numbers (dropout) and the order of samples are not, and with the "
        f"same batch_size a step has {ranks.world_size / count:g} times as many samples"
    )
    logger.warning("%s", why)
    trainer.note("resume_not_exact", why=why)
    drawing = ranks.rank if trainer.engine.averages else 0  # Ranks that share each batch draw the same numbers.
    if drawing < count:
        own = {name: saved.section(name, drawing) for name in ("rng", "streams")}
    else:
        seed_everything(fingerprint([trainer.options.seed, saved.meta.get("step"), ranks.world_size, drawing]))
        own = {"rng": rng_state(), "streams": {**sections["streams"], "hooks": {}}}
    losses = [saved.section("losses", rank) for rank in range(count)]
    return {**sections, **own, "losses": add_losses(losses, is_counted=ranks.rank == 0)}


def _processes(count: int) -> str:
    return "one process" if count == 1 else f"{count} processes"


def like_weights(model: torch.nn.Module) -> Like:
    """Return a function that finds a tensor of a model's state by the name under which it was saved."""
    present = plain_state_dict(model)
    return lambda name, shape, sharded: present.get(name)


def _like_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> Like:
    """Return a function that finds the parameter that a saved tensor of an optimizer belongs to."""
    params = [[param for group in one.param_groups for param in group["params"]] for one in optimizers]

    def find(name: str, shape: torch.Size, sharded: bool) -> torch.Tensor | None:
        match = _OF_PARAMETER.match(name)
        if match is None or int(match[1]) >= len(params) or int(match[2]) >= len(params[int(match[1])]):
            return None
        found: torch.Tensor = params[int(match[1])][int(match[2])]
        return found

    return find


def _like_named(model: torch.nn.Module, saved: SavedCheckpoint) -> Like:
    """Return a function that finds the parameter of a hook's saved tensor, whose name ends with the parameter's.

    A tensor that was saved whole beside a sharded parameter, or in shards beside a whole one, is read as a whole.
    """
    present, then = plain_state_dict(model), saved.tensors("model")

    def find(name: str, shape: torch.Size, sharded: bool) -> torch.Tensor | None:
        parts = name.split(".")
        names = (".".join(parts[index:]) for index in range(len(parts)))
        own = next((one for one in names if one in present), None)
        return None if own is None or (own in then and then.is_sharded(own) != sharded) else present[own]

    return find
