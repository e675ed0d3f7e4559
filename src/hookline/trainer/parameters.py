"""The parameters that are trained: those the optimizers own, by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hookline.errors import TrainingError


def trained_parameters(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, torch.nn.Parameter]:
    """Every parameter of every optimizer once, in the model's order; one outside the model is named by its place.

    A model that was compiled beforehand calls its parameters as if it had not been: patterns and saved states fit both.
    The update chain, the norm and the rescaling of windows span exactly these.
    """
    owned = {
        id(param): (param, f"optimizers.{index}.{group_index}.{place}")
        for index, optimizer in enumerate(optimizers)
        for group_index, group in enumerate(optimizer.param_groups)
        for place, param in enumerate(group["params"])
    }
    named = ((name.replace("_orig_mod.", ""), param) for name, param in model.named_parameters())
    inside = {name: param for name, param in named if id(param) in owned}
    if not inside:
        kind = type(model).__name__
        raise TrainingError(f"no optimizer owns a parameter of the model ({kind}): were they made from another model?")
    known = {id(param) for param in inside.values()}
    return inside | {name: param for key, (param, name) in owned.items() if key not in known}


def group_sizes(optimizers: Sequence[torch.optim.Optimizer]) -> list[int]:
    """How many parameters each group has: another answer means that somebody added some."""
    return [len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups]


def unowned_parameters(model: torch.nn.Module, trained: dict[str, torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Parameters of the model that no optimizer clears after a step."""
    owned = {id(param) for param in trained.values()}
    return [param for param in model.parameters() if id(param) not in owned]


def cuda_devices_of(model: torch.nn.Module) -> list[int]:
    """The CUDA devices that a step may draw random numbers on: the current one, and wherever the model lies."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    tensors = (*model.parameters(), *model.buffers())
    return sorted({torch.cuda.current_device(), *(one.device.index for one in tensors if one.is_cuda)})
