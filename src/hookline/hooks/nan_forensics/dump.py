"""Write and read crash folders: the data to run one batch again, and the findings from when it happened.

crashes/step-00000042/
  crash.json   for people: what, where, the diagnosis, every parameter's statistics, the run's configuration
  state/       for `hookline replay`: the batch, the random states and the weights; safetensors, JSON, a manifest
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hookline._fs import explain, refuse_link, rename_to_free_name
from hookline._names import load_plain_state_dict, plain_modules, plain_parameters, plain_state_dict
from hookline._tensors import is_sharded
from hookline.activations.debug import statistics_of
from hookline.checkpoints.format import Section, encode
from hookline.checkpoints.frozen import fill_in_frozen
from hookline.checkpoints.store import read_checkpoint, temporary_name, write_checkpoint
from hookline.errors import CheckpointError, HooklineError, got
from hookline.gradients.view import local_tensor
from hookline.hooks.nan_forensics.diagnosis import Diagnosis, diagnose
from hookline.record import read_json, redact, strict_json
from hookline.record.format import utc_now
from hookline.record.json_lines import write_json_atomic
from hookline.run.control import ModelCall, RunControl

REPORT, STATE = "crash.json", "state"
Crash = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""The report of a crash, its state and the state's metadata."""


@dataclass
class RecordedBatch:
    """One micro-batch, or one call of the model, and the random states before its forward pass.

    That is enough to run it again on the same weights.
    """

    batch: Any
    batch_idx: int
    dataloader_name: str
    random_state: dict[str, Any]
    step: int
    loss: torch.Tensor | None = None


@dataclass(frozen=True)
class Replay:
    """A crash that was run again."""

    crash: Path
    then: dict[str, Any]
    """The report of the crash."""
    now: Diagnosis
    same: bool
    """Whether the loss and the modules and parameters in trouble are those of the crash."""


def write_crash(
    root: Path, trainer: RunControl, recorded: RecordedBatch, reason: str, diagnosis: Diagnosis, with_state: bool
) -> Path:
    """Write a crash folder. Parts that cannot be written exactly are left out, and crash.json says why.

    Args:
        root: The directory that holds the run's crashes.
        trainer: The run.
        recorded: The micro-batch that went wrong.
        reason: The problem.
        diagnosis: Where it came from.
        with_state: Whether to write the weights; without them, the folder is small.

    Returns:
        The folder.
    """
    model, step = trainer.model, trainer.step
    name = f"step-{step:08d}" + (f"-rank-{trainer.ranks.rank}" if trainer.ranks.world_size > 1 else "")
    folder = temporary_name(root / name)
    is_call = isinstance(recorded.batch, ModelCall)
    batch = vars(recorded.batch) if is_call else recorded.batch
    sections = {"batch": _with_plain_dicts(batch), "random_state": recorded.random_state}
    encoded, left_out = {}, {}
    named = plain_parameters(model)
    if with_state and any(map(is_sharded, named.values())):
        left_out["model"] = "the model is sharded, and only this rank writes; take the weights from a checkpoint"
    elif with_state:
        unsaved = trainer.unsaved_parameters()
        sections["model"] = {name: value for name, value in plain_state_dict(model).items() if name not in unsaved}
        sections |= {"frozen": dict(unsaved)} if unsaved else {}
    # Each section is encoded separately, so that one that cannot be written does not prevent the others from being
    # saved.
    for section, tree in sections.items():
        try:
            encoded[section] = Section(*encode(tree))
        except CheckpointError as error:
            left_out[section] = str(error)
    in_eval_mode = [name for name, module in plain_modules(model).items() if not module.training]
    try:
        folder.mkdir(parents=True)
        write_checkpoint(folder, STATE, encoded, {"step": step, "modules_in_eval_mode": in_eval_mode})
        # For a sharded parameter, only its local part: statistics of the whole would need the other ranks.
        tensors = [local_tensor(param.detach()) for param in named.values()]
        rows = zip(named.items(), statistics_of(tensors), strict=True)
        parameters = {name: {"shape": list(param.shape), "dtype": param.dtype, **row} for (name, param), row in rows}
        write_json_atomic(folder / REPORT, {
            "reason": reason, "time": utc_now(), "run_id": trainer.run_id, "step": step, "epoch": trainer.epoch,
            "batch_idx": recorded.batch_idx, "dataloader_name": recorded.dataloader_name,
            "is_call": is_call,
            "autopsy": diagnosis.as_dict(), "left_out": left_out, "parameters": parameters,
            "torch": torch.__version__, "python": platform.python_version(), "device": str(trainer.device),
            "config": redact(trainer.describe()),
        })  # fmt: skip
        return rename_to_free_name(folder, root / name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # after the rename there is nothing to remove


def _with_plain_dicts(batch: Any) -> Any:
    """Return a batch with mappings of any class as dicts, which a forward pass can read as well."""
    if isinstance(batch, Mapping):
        return {key: _with_plain_dicts(value) for key, value in batch.items()}
    return type(batch)(map(_with_plain_dicts, batch)) if type(batch) in (list, tuple) else batch


def read_crash(path: str | Path) -> Crash:
    """Read a crash folder: its report, its verified state and the state's metadata.

    Raises:
        HooklineError: If it is not a crash folder, or lacks data for a replay.
        CheckpointError: If the state is damaged.
    """
    folder = Path(path)
    if not os.path.lexists(folder / REPORT):
        raise HooklineError(f"{folder} has no {REPORT}; expected a crash folder, runs/…/crashes/step-00000042")
    report = read_json(folder / REPORT)
    _check_types(folder / REPORT, report, {"step": int, "reason": str, "autopsy": dict, "left_out": dict})
    _check_types(folder / REPORT, report["autopsy"], {"summary": str})
    try:
        refuse_link(folder / STATE)
    except OSError as error:
        raise HooklineError(explain(folder / STATE, error, "read")) from error
    sections, meta = read_checkpoint(folder / STATE)
    for name in ("batch", "random_state"):
        if name not in sections:
            why = report["left_out"].get(name, "it is not there")
            raise HooklineError(f"{folder} cannot be replayed without its {name}: {why}")
    _check_types(folder / STATE, meta, {"step": int, "modules_in_eval_mode": list})
    _check_types(folder / STATE, sections, {name: dict for name in sections if name != "batch"})
    return report, sections, meta


def _check_types(where: Path, fields: Mapping[str, Any], expected: Mapping[str, type]) -> None:
    """Check that all fields exist and have the right types: the files may come from anywhere."""
    for name, kind in expected.items():
        if not isinstance(fields.get(name), kind):
            given = got(fields[name]) if name in fields else "it is not there"
            problem = f"expected {name} as {kind.__name__}, {given}"
            raise HooklineError(f"{where} is damaged or was not written by Hookline: {problem}")


def replay_crash(path: str | Path, trainer: RunControl, weights_loaded: bool = False) -> Replay:
    """Run a crash's batch again in a trainer built like the one that crashed.

    >>> replay = replay_crash("runs/…/crashes/step-00000042", trainer)
    >>> print(replay.now)

    Args:
        path: The crash folder.
        trainer: The trainer; the crash's weights overwrite its own.
        weights_loaded: Whether the trainer has the right weights already, for a crash that was written without them.

    Returns:
        What happened then and now.

    Raises:
        HooklineError: If the crash cannot be replayed.
    """
    return replay(path, read_crash(path), trainer, weights_loaded)


def replay(path: str | Path, crash: Crash, trainer: RunControl, weights_loaded: bool) -> Replay:
    """Run the batch of a crash that was read from a folder again, as `replay_crash` does."""
    report, sections, meta = crash
    if "model" in sections:
        with _explained(path, "its weights do not fit this model"):
            weights = fill_in_frozen(trainer.model, sections["model"], sections.get("frozen", {}))
            load_plain_state_dict(trainer.model, weights)
    elif not weights_loaded:
        raise HooklineError(f"{path} has no weights: load those before step {meta['step']} (hookline replay --weights)")
    # Dropout and batch norm must behave as they did then.
    in_eval_mode = set(meta["modules_in_eval_mode"])
    for name, module in plain_modules(trainer.model).items():
        module.training = name not in in_eval_mode
    with _explained(path, "running its batch raised an error"):
        batch = ModelCall(**sections["batch"]) if report.get("is_call") else sections["batch"]
        now = diagnose(trainer, batch, sections["random_state"], by="replay", step=meta["step"])
    # Shapes and statistics may differ in detail, and anomaly detection may name another operation.
    found_now = strict_json.simplify(now.as_dict())
    compared = found_now.keys() - {"summary", "inputs", "outputs", "statistics", "operation"}
    same = all(report["autopsy"].get(name) == found_now[name] for name in compared)
    return Replay(Path(path), report, now, same)


@contextmanager
def _explained(path: str | Path, problem: str) -> Iterator[None]:
    """Turn any exception that a foreign crash folder causes in torch or the model into one error that names it."""
    try:
        yield
    except HooklineError:
        raise
    except Exception as error:
        raise HooklineError(f"{path} cannot be replayed: {problem}: {type(error).__name__}: {error}") from error
