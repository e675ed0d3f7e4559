"""Find the parameters that an optimizer owns, and whether they are finite; step.py asks again when groups are added."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hookline._names import plain_parameters, unwrap_module
from hookline.errors import TrainingError
from hookline.gradients.view import local_tensor


def trained_parameters(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, torch.nn.Parameter]:
    """Return every parameter of every optimizer once, in the model's order.

    The update chain, the gradient norm and the scaling of accumulation windows cover exactly these. A parameter outside
    the model is named by its optimizer, group and index.

    Raises:
        TrainingError: If the model has no parameters, or no optimizer owns one of them.
    """
    if next(model.parameters(), None) is None:
        raise TrainingError(f"the model ({type(model).__name__}) has no parameters: there is nothing to train")
    owned = {
        id(param): (param, f"optimizers.{index}.{group_index}.{place}")
        for index, optimizer in enumerate(optimizers)
        for group_index, group in enumerate(optimizer.param_groups)
        for place, param in enumerate(group["params"])
    }
    inside = {name: param for name, param in plain_parameters(model).items() if id(param) in owned}
    if not inside:
        kind = type(unwrap_module(model)).__name__
        raise TrainingError(f"no optimizer owns a parameter of the model ({kind}): were they made from another model?")
    known = {id(param) for param in inside.values()}
    return inside | {name: param for key, (param, name) in owned.items() if key not in known}


def is_finite(parameter: torch.Tensor) -> bool:
    """Return whether this rank's part of a parameter holds no NaN and no infinity, as far as torch can tell."""
    try:
        return bool(local_tensor(parameter).isfinite().all())
    except Exception:  # torch has no such operation for the dtype, or the device is gone
        return True


def group_sizes(optimizers: Sequence[torch.optim.Optimizer]) -> list[int]:
    """Return the number of parameters of each group; it changes when parameters are added."""
    return [len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups]


def unowned_parameters(model: torch.nn.Module, trained: dict[str, torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Return the parameters of the model whose gradients no optimizer clears."""
    owned = {id(param) for param in trained.values()}
    return [param for param in model.parameters() if id(param) not in owned]
