"""The contents of a checkpoint: collect the sections from a run, and restore a run from them on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hookline._console import logger
from hookline._names import plain_parameters, plain_state_dict
from hookline._text import counted
from hookline.checkpoints.find import find_checkpoint
from hookline.checkpoints.frozen import fill_in_frozen
from hookline.checkpoints.saves import Alike
from hookline.checkpoints.shards import Like
from hookline.checkpoints.store import SavedCheckpoint
from hookline.core.failures import raise_if_quit
from hookline.errors import CheckpointError, error_text
from hookline.ranks import fingerprint
from hookline.record.provenance import config_hash
from hookline.record.redaction import redact_text
from hookline.run.epoch_stats import add_losses
from hookline.run.hook_state import hooks_state, load_hooks_state
from hookline.run.rng import restore_rng, rng_state, seed_everything
from hookline.run.saved_parts import check_groups, check_kind, load_saved_weights
from hookline.trainer.data.loader_state import restore_loader_states, restore_source_states, source_states
from hookline.trainer.schedules import check_kind_of_scheduler, restore_schedulers

if TYPE_CHECKING:
    from hookline.trainer.checkpointing import CheckpointedRun

SAME_SECTIONS = (
    "optimizers", "optimizer_settings", "schedulers", "scaler", "progress", "counts", "hook_names", "frozen",
)  # fmt: skip


def collect_sections(run: CheckpointedRun) -> dict[str, Any]:
    """Return the sections of a checkpoint; the hooks' sections are already encoded."""
    scaler, batches = run.engine.scaler, run.reader
    of_hooks = hooks_state(run)
    return {
        "model": _state_of(run.model, "the model", plain_state_dict),
        "optimizers": [_state_of(optimizer, "an optimizer") for optimizer in run.optimizers],
        # A scheduler's functions belong to the code.
        "schedulers": [
            {key: value for key, value in _state_of(scheduler, "a scheduler").items() if not callable(value)}
            for scheduler in run.schedulers
        ],
        "optimizer_settings": run.optimizer_settings,
        "scaler": scaler.state_dict() if scaler is not None else None,
        "progress": run.progress.state_dict(),
        "rng": rng_state(),
        "position": run.position(),
        "loaders": {
            "train": source_states(run.train_loaders),
            "val": source_states(run.val_loaders),
            "own": batches.end_states() if run.progress.epoch_over and batches is not None else {},
        },
        "losses": run.stats.state_dict(),
        "counts": {**run.run_status.state_dict(), **_stop(run)},
        **of_hooks,
    }


def alike_sections(model: torch.nn.Module) -> Alike:
    """Return what is identical on all ranks, without shards; rank 0 saves it. None stands for a whole section.

    For the model, these are the parameters, if it is a DDP model. Buffers may differ.
    """
    is_ddp = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    parameters = list(plain_parameters(model, remove_duplicate=False)) if is_ddp else []
    return {**dict.fromkeys(SAME_SECTIONS), "model": parameters}


def _state_of(part: Any, what: str, read: Callable[[Any], Any] = methodcaller("state_dict")) -> dict[str, Any]:
    """Return the state_dict of a part of the run; if it raises, the error names the part."""
    try:
        state: dict[str, Any] = read(part)
    except Exception as error:
        where = f"state_dict() of {what} ({type(part).__name__})"
        raise_if_quit(error, where)
        raise CheckpointError(f"{where} raised {error_text(error)}") from error
    return state


def _stop(run: CheckpointedRun) -> dict[str, Any]:
    """Return the stop that was requested, if any, for a run that is killed before it ends."""
    if run.run_status.lasting_stop is None or not run.running:
        return {}
    reason, by, _ = run.run_status.lasting_stop
    attempt, terms = len(run.record.run["attempts"]), _stop_terms(run, by)
    return {"stop": {"run_id": run.run_id, "attempt": attempt, "reason": redact_text(reason), "by": by, "under": terms}}


def _stop_terms(run: CheckpointedRun, by: str | None) -> str:
    """Return the hash of the settings that a stop depends on: the run's length, and the hook's plain parameters.

    Only their equality matters, and one of them may be a secret.
    """
    hooks = [hook.parameters for hook in run.hooks.list_hooks() if hook.name == by]
    parameters = {key: value for hook in hooks for key, value in hook.items() if isinstance(value, (int, float, str))}
    options = run.options
    return config_hash({"max_steps": options.max_steps, "max_epochs": options.max_epochs, "hook": parameters})


def pending_stop(run: CheckpointedRun) -> tuple[str, str | None] | None:
    """Return the reason and hook of the stop during which the resumed run was killed; None if it should continue.

    That is the case if the stop was carried out: this attempt or a later one was closed, with any outcome but
    "interrupted", so that resuming asks for more; if its terms were changed, for instance `max_steps` or the hook's
    `patience`; or if this is another run.
    """
    stop = run.run_status.loaded_stop
    if stop is None or stop["run_id"] != run.run_id or stop["under"] != _stop_terms(run, stop["by"]):
        return None
    attempts = run.record.run["attempts"][stop["attempt"] - 1 : -1]
    # An attempt without an outcome was killed.
    outcomes = [attempt.get("outcome") for attempt in attempts]
    was_carried_out = any(outcome not in (None, "interrupted") for outcome in outcomes)
    return None if was_carried_out else (stop["reason"], stop["by"])


def restore_sections(run: CheckpointedRun, saved: SavedCheckpoint) -> None:
    """Restore weights, optimizers, counters, random streams and hooks."""
    sections = _read_sections(run, saved)
    for what, present in (("optimizers", run.optimizers), ("schedulers", run.schedulers)):
        then, now = len(sections[what]), len(present)
        if then != now:
            its = counted(then, what.removesuffix("s"))
            raise CheckpointError(f"the checkpoint has {its}, but this run has {now}; the numbers must match")
    for optimizer, state in zip(run.optimizers, sections["optimizers"], strict=True):
        check_kind(optimizer, state)
    for scheduler, state in zip(run.schedulers, sections["schedulers"], strict=True):
        check_kind_of_scheduler(scheduler, state)
    # This way, a run that cannot continue there changes nothing; without a run, perhaps only the weights are wanted.
    if run.running and (position := sections["position"]) is not None:
        reader = run.make_reader(sections["progress"]["epoch"])
        reader.check(position, sections["progress"]["batch_idx"] + 1)
    _load_model(run.model, sections)
    for optimizer, state in zip(run.optimizers, sections["optimizers"], strict=True):
        check_groups(optimizer, state)
    run.progress.load_state_dict(sections["progress"], sections["position"])
    if saved.world_size != run.ranks.world_size:
        _warn_of_other_ranks(run, saved.world_size)
    restore_schedulers(run, sections["schedulers"], sections["optimizers"], sections.get("optimizer_settings", ()))
    if run.engine.scaler is not None and sections["scaler"]:
        run.engine.scaler.load_state_dict(sections["scaler"])
    run.agreement.restored()
    run.reader = None
    run.stats.load_state_dict(sections["losses"])
    run.event_args.forget_step()
    run.run_status.load_state_dict(sections["counts"])
    load_hooks_state(run, sections)
    restore_source_states(run.train_loaders, sections["loaders"]["train"])
    restore_source_states(run.val_loaders, sections["loaders"]["val"])
    restore_loader_states(run.train_loaders, sections["loaders"]["own"])
    run.train_loaders.idle_states.clear()  # they belong to a later time
    restore_rng(sections["rng"])


def load_weights(model: torch.nn.Module, source: str | Path | SavedCheckpoint) -> None:
    """Load only the weights of a checkpoint."""
    saved = (source if isinstance(source, SavedCheckpoint) else find_checkpoint(Path(source))[0]).verified()
    if "model" not in saved.names:
        has = ", ".join(saved.names)
        raise CheckpointError(f"{saved.path} has no weights: it has the sections {has}, and no model")
    names = [name for name in ("model", "frozen") if name in saved.names]
    _load_model(model, {name: saved.section(name, like=_like_weights(model)) for name in names})


def _load_model(model: torch.nn.Module, sections: Mapping[str, Any]) -> None:
    """Load the weights; the model must provide the frozen ones that a checkpoint was saved without."""
    weights = fill_in_frozen(model, sections["model"], sections.get("frozen", {}))
    load_saved_weights(model, weights)


# ---- reading as this rank needs it -----------------------------------------------------------------------------------


def _read_sections(run: CheckpointedRun, saved: SavedCheckpoint) -> dict[str, Any]:
    """Return the sections of a checkpoint for this rank.

    If more or fewer ranks have saved it, each rank reads rank 0's sections, and `_sections_of_rank` replaces those that
    differ between ranks.
    """
    ranks = run.ranks
    is_same = saved.world_size == ranks.world_size
    forms: dict[str, Like] = {
        "model": _like_weights(run.model),
        "optimizers": _like_optimizers(run.optimizers),
        **dict.fromkeys(("hooks", "update_state"), _like_named(run.model, saved)),
    }
    rank = ranks.rank if is_same else 0
    sections = {name: saved.section(name, rank, forms.get(name)) for name in saved.names}
    return sections if is_same else _sections_of_rank(run, saved, sections)


def _sections_of_rank(run: CheckpointedRun, saved: SavedCheckpoint, sections: dict[str, Any]) -> dict[str, Any]:
    """Turn rank 0's sections into those of this rank, for a checkpoint that more or fewer ranks have saved.

    A rank that existed then continues its random streams, and a new rank starts new ones. Rank 0 gets the epoch's
    losses of all ranks, because every mean is taken over all ranks.
    """
    ranks, count = run.ranks, saved.world_size
    drawing = run.engine.first_with_batch(ranks.rank)  # Ranks that share each batch draw the same numbers.
    if drawing < count:
        of_rank = {name: saved.section(name, drawing) for name in ("rng", "streams")}
    else:
        seed_everything(fingerprint([run.options.seed, saved.meta.get("step"), ranks.world_size, drawing]))
        of_rank = {"rng": rng_state(), "streams": {**sections["streams"], "hooks": {}}}
    losses = [saved.section("losses", rank) for rank in range(count)]
    return {**sections, **of_rank, "losses": add_losses(losses, is_counted=ranks.rank == 0)}


def _warn_of_other_ranks(run: CheckpointedRun, count: int) -> None:
    """Say what differs in a run that continues from a checkpoint of more or fewer processes."""
    now = run.ranks.world_size
    why = (
        f"the checkpoint was saved by {_processes(count)}, and this run has {_processes(now)}: weights, optimizers and "
        "hooks are the same; random numbers (dropout) and the order of samples are not; and with the same batch_size a "
        f"step has {now / count:g} times as many samples"
    )
    logger.warning("%s", why)
    run.note("resume_not_exact", why=why)


def _processes(count: int) -> str:
    return "one process" if count == 1 else f"{count} processes"


def _like_weights(model: torch.nn.Module) -> Like:
    """Return a function that finds a tensor of a model's state by the name under which it was saved."""
    present = plain_state_dict(model)
    return lambda name, sharded: present.get(name)


def _like_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> Like:
    """Return a function that finds the parameter that a saved tensor of an optimizer belongs to."""
    params = {
        f"{index}.state.{place}": param
        for index, optimizer in enumerate(optimizers)
        for place, param in enumerate(param for group in optimizer.param_groups for param in group["params"])
    }
    return lambda name, sharded: params.get(".".join(name.split(".")[:3]))  # followed by "exp_avg", for instance


def _like_named(model: torch.nn.Module, saved: SavedCheckpoint) -> Like:
    """Return a function that finds the parameter of a hook's saved tensor, whose name ends with the parameter's.

    A tensor that was saved whole although its parameter is sharded, or the other way around, is read as a whole.
    """
    present, then = plain_state_dict(model), saved.tensors("model")

    def find(name: str, sharded: bool) -> torch.Tensor | None:
        parts = name.split(".")
        names = (".".join(parts[index:]) for index in range(len(parts)))
        match = next((candidate for candidate in names if candidate in present), None)
        return None if match is None or (match in then and then.is_sharded(match) != sharded) else present[match]

    return find
