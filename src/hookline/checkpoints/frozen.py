"""Leave frozen parameters out of checkpoints (`trainable_only`), and take them from the model when one is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hookline._names import plain_parameters
from hookline._tensors import is_sharded
from hookline.checkpoints.format import problem_with
from hookline.errors import CheckpointError

Fingerprints = dict[str, dict[str, Any]]
"""Shape, dtype and the sum of the bits of parameters, by name."""

_WORD = torch.int64.itemsize
_MAX_NAMED = 3  # parameters that an error names


def frozen_parameters(model: torch.nn.Module) -> Fingerprints:
    """Return the fingerprints of the parameters that currently need no gradient; an optimizer may own them.

    Parameters in shards are left out: no rank has all of their bits.
    """
    return {
        name: fingerprint(param)
        for name, param in plain_parameters(model, remove_duplicate=False).items()
        if not param.requires_grad and problem_with(param) is None
    }


def fill_in_frozen(model: torch.nn.Module, saved: Mapping[str, Any], left_out: Fingerprints) -> dict[str, Any]:
    """Return a saved state of a model with the frozen parameters that were left out, taken from the model itself.

    Raises:
        CheckpointError: If the model lacks them, or has different ones under their names.
    """
    params = plain_parameters(model, remove_duplicate=False)
    problems = [problem for name, then in left_out.items() if (problem := _difference(name, params.get(name), then))]
    if problems:
        more = f", and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
        raise CheckpointError(
            "the checkpoint was saved without its frozen parameters (trainable_only), and those of this model differ: "
            f"{', '.join(problems[:_MAX_NAMED])}{more}; build the model with the frozen weights of that run"
        )
    return {**saved, **{name: params[name].detach() for name in left_out}}


def _difference(name: str, param: torch.nn.Parameter | None, then: Mapping[str, Any]) -> str | None:
    """Return how a parameter differs from the one that was left out; None if it does not."""
    if param is None:
        return f"{name} is missing"
    now = fingerprint(param) if problem_with(param) is None else {"shape": list(param.shape), "dtype": param.dtype}
    for what in ("shape", "dtype"):
        if now[what] != then[what]:
            return f"{name} has the {what} {now[what]} instead of {then[what]}"
    # The sum of a shard says nothing about the whole parameter.
    return None if is_sharded(param) or now == then else f"{name} has different values"


def fingerprint(tensor: torch.Tensor) -> dict[str, Any]:
    """Return shape, dtype and the sum of a tensor's bits, which is the same on every device.

    Whole words are summed without a copy; a sum of smaller integers would first copy them to larger ones.
    """
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % _WORD:
        data = data.clone()
    end = data.numel() // _WORD * _WORD
    total = int(data[:end].view(torch.int64).sum()) + int(data[end:].sum())
    return {"shape": list(tensor.shape), "dtype": tensor.dtype, "sum": total}
