"""A crash on disk: what is needed to run one batch again, and what was found when it happened.

crashes/step-00000042/
  crash.json   for people: what, where, the autopsy, every parameter's statistics, the run's configuration
  state/       for `hookline replay`: the batch, the random streams and the weights; safetensors, JSON, a manifest
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from hookline.activations.debug import statistics_of
from hookline.checkpoints import encode, read_checkpoint, write_checkpoint
from hookline.errors import CheckpointError, HooklineError
from hookline.hooks.autopsy import Autopsy, examine
from hookline.record import jsonsafe, read_json, redact
from hookline.record.provenance import utc_now
from hookline.record.writers import write_json_atomic

REPORT, STATE = "crash.json", "state"
NEEDED = ("batch", "random_state")


@dataclass
class Scene:
    """One micro-batch and the random streams before its forward pass: enough to run it again on the same weights."""

    batch: Any
    batch_idx: int
    dataloader_name: str
    random_state: dict[str, Any]
    step: int = 0
    loss: torch.Tensor | None = None


@dataclass(frozen=True)
class Replay:
    """A crash that was run again."""

    crash: Path
    then: dict[str, Any]
    now: Autopsy
    same: bool
    """Whether loss, modules and parameters in trouble are those of the crash."""


def write_crash(root: Path, trainer: Any, scene: Scene, reason: str, autopsy: Autopsy, with_state: bool) -> Path:
    """Write a crash folder under `root`. What has no exact form on disk is left out, and crash.json says so."""
    folder = _new_folder(root, f"step-{trainer.step:08d}")
    model = trainer.model
    wanted = {"batch": plain(scene.batch), "random_state": scene.random_state}
    if with_state:
        wanted["model"] = model.state_dict()
    sections, left_out = _storable(wanted)
    resting = [name for name, module in model.named_modules() if not module.training]
    write_checkpoint(folder, STATE, sections, {"step": trainer.step, "modules_in_eval_mode": resting})
    write_json_atomic(folder / REPORT, {
        "reason": reason, "time": utc_now(), "run_id": trainer.run_id, "step": trainer.step, "epoch": trainer.epoch,
        "batch_idx": scene.batch_idx, "dataloader_name": scene.dataloader_name,
        "autopsy": autopsy.as_dict(), "left_out": left_out, "parameters": parameter_statistics(model),
        "torch": torch.__version__, "python": platform.python_version(), "device": str(trainer.device),
        "config": redact(getattr(trainer, "describe", dict)()),
    })  # fmt: skip
    return folder


def _new_folder(root: Path, name: str) -> Path:
    count = 0
    while True:
        folder = root / (f"{name}-{count}" if count else name)
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            count += 1


def _storable(sections: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The sections that can be written exactly, and why the others cannot."""
    kept, left_out = {}, {}
    for name, tree in sections.items():
        try:
            encode(tree)
        except CheckpointError as error:
            left_out[name] = str(error)
        else:
            kept[name] = tree
    return kept, left_out


def plain(batch: Any) -> Any:
    """A batch with mappings of any kind as dicts, which is all that a forward pass sees of them."""
    if isinstance(batch, Mapping):
        return {key: plain(value) for key, value in batch.items()}
    return type(batch)(map(plain, batch)) if type(batch) in (list, tuple) else batch


def parameter_statistics(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Shape, dtype and statistics of every parameter."""
    named = dict(model.named_parameters())
    rows = zip(named.items(), statistics_of([param.detach() for param in named.values()]), strict=True)
    return {name: {"shape": list(param.shape), "dtype": param.dtype, **row} for (name, param), row in rows}


def read_crash(path: str | Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The report, the verified state and its meta."""
    folder = Path(path)
    if not (folder / REPORT).is_file():
        raise HooklineError(f"{folder} has no {REPORT}; a crash folder is one such as runs/…/crashes/step-00000042")
    report = read_json(folder / REPORT)
    sections, meta = read_checkpoint(folder / STATE)
    if missing := [name for name in NEEDED if name not in sections]:
        why = report.get("left_out", {}).get(missing[0], "it is not there")
        raise HooklineError(f"{folder} cannot be replayed without its {missing[0]}: {why}")
    return report, sections, meta


def replay_crash(path: str | Path, trainer: Any, weights_loaded: bool = False) -> Replay:
    """Run a crash's batch again in a trainer like the one that crashed: same weights, same random streams.

    The trainer's weights are overwritten by those of the crash. A crash that was written without them needs
    `weights_loaded`: the trainer has the right ones already.

    >>> replay = replay_crash("runs/…/crashes/step-00000042", trainer)
    >>> print(replay.now)
    """
    report, sections, meta = read_crash(path)
    if "model" in sections:
        trainer.model.load_state_dict(sections["model"])
    elif not weights_loaded:
        raise HooklineError(f"{path} holds no weights: load those of step {meta['step']} (hookline replay --weights)")
    for name, module in trainer.model.named_modules():
        module.training = name not in meta["modules_in_eval_mode"]
    now = examine(trainer, sections["batch"], sections["random_state"], by="replay")
    same = _comparable(report["autopsy"]) == _comparable(jsonsafe.simplify(now.as_dict()))
    return Replay(Path(path), report, now, same)


def _comparable(autopsy: Mapping[str, Any]) -> dict[str, Any]:
    """What two autopsies of one crash must share, as JSON says it."""
    names = {one.name for one in fields(Autopsy)} - {"inputs", "outputs", "statistics", "operation"}
    return {name: autopsy.get(name) for name in names}
