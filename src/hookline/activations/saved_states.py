"""Captured states on disk, as safetensors."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from hookline.activations.captured import CapturedState
from hookline.activations.moment import tensors_in
from hookline.errors import HooklineError

NOT_STORED = (torch.complex128, torch.qint8, torch.quint8, torch.qint32)  # dtypes that safetensors does not have
FOLDER = "captures"  # of a run's directory
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_=-]+")


def file_of_hook(run_dir: Path, hook: str) -> Path:
    """Where a run keeps what one of its hooks captured, whatever that is called."""
    return run_dir / FOLDER / f"{_NOT_IN_NAMES.sub('_', hook)}.safetensors"


def save_states(states: list[CapturedState], path: str | Path) -> Path:
    """Write captured tensors to a safetensors file, whole or not at all; its metadata has names, steps and phases."""
    from safetensors.torch import save

    tensors: dict[str, torch.Tensor] = {}
    about: dict[str, str] = {}
    for state in states:
        for part in ("inputs", "kwargs", "outputs"):
            for index, tensor in enumerate(tensors_in(getattr(state, part))):
                key = f"{state.name}/{state.call}/{part}/{index}"
                tensors[key] = _as_stored(key, tensor)
                about[key] = f"step={state.step} phase={state.phase} layer_idx={state.layer_idx}"
    return _write_whole(Path(path), save(tensors, metadata=about))


def _write_whole(path: Path, data: bytes) -> Path:
    """Beside, and then in its place: a full disk leaves the file of before."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(data)
        return beside.replace(path)
    except OSError as error:
        remedy = "free space, fix its permissions or choose another directory"
        raise HooklineError(f"cannot write {path}: {error.strerror or error}; {remedy}") from error
    finally:
        beside.unlink(missing_ok=True)


def _as_stored(key: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.dtype in NOT_STORED:
        kind = "nested" if tensor.is_nested else f"{tensor.dtype}, {tensor.layout}"
        raise HooklineError(f"safetensors cannot hold {key} ({kind}); make it a plain tensor with reduce=…")
    return tensor.detach().cpu().clone().contiguous()
