"""Find the parameters that an optimizer owns, and whether they are finite; step.py asks again when groups are added."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.parameter import is_lazy

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
        raise TrainingError(
            f"no optimizer has a parameter of the model ({kind}); were they created from another model?"
        )
    known = {id(param) for param in inside.values()}
    return inside | {name: param for key, (param, name) in owned.items() if key not in known}


def is_finite(parameter: torch.Tensor) -> bool:
    """Return whether this rank's part of a parameter has neither NaN nor infinity, as far as torch can tell."""
    try:
        return bool(local_tensor(parameter).isfinite().all())
    except Exception:  # torch has no such operation for the dtype, or the device is gone
        return True


def was_trained(model: torch.nn.Module) -> bool:
    """Return whether a model's weights seem to come from an earlier training.

    That is the case if most of its parameters are frozen, or if the weights of a normalization, which begin equal,
    differ.
    """
    parameters = [*model.parameters()]
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in parameters if not is_lazy(parameter)]
    if 2 * sum(size for size, is_trained in sizes if not is_trained) > sum(size for size, _ in sizes):
        return True
    norms = (module for module in model.modules() if "norm" in type(module).__name__.lower())
    weights = (weight for norm in norms if isinstance(weight := getattr(norm, "weight", None), torch.nn.Parameter))
    return any(weight.dim() == 1 and not is_lazy(weight) and _differs(weight) for weight in weights)


def _differs(parameter: torch.Tensor) -> bool:
    """Return whether the values of this rank's part of a parameter differ, as far as torch can tell."""
    try:
        values = local_tensor(parameter)
        return bool((values != values.flatten()[0]).any())
    except Exception:  # an empty part, or a dtype or device that torch cannot read
        return False


def group_sizes(optimizers: Sequence[torch.optim.Optimizer]) -> list[int]:
    """Return the number of parameters of each group; it changes when parameters are added."""
    return [len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups]


def unowned_parameters(model: torch.nn.Module, trained: dict[str, torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Return the parameters of the model whose gradients no optimizer clears."""
    owned = {id(param) for param in trained.values()}
    return [param for param in model.parameters() if id(param) not in owned]
