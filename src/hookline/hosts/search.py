"""Find the model that an optimizer trains, among the objects that are alive."""

from __future__ import annotations

import gc
import sys
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from hookline.core.entry import numbered


class Models(nn.ModuleDict):
    """Several models that are trained in one run, as in a GAN. It is in training mode while one of them is."""

    @property
    def training(self) -> bool:
        return any(model.training for model in self.children())

    @training.setter
    def training(self, value: bool) -> None:
        """Do nothing: each model knows its own mode."""


class Training(NamedTuple):
    """The model that a script trains, and its GradScaler."""

    model: nn.Module
    """The outermost module with parameters of the optimizer; `Models` if other optimizers train other modules."""
    scaler: Any
    """The GradScaler that is in use, if one is."""


def find_training(optimizer: torch.optim.Optimizer, former: Container[torch.optim.Optimizer] = ()) -> Training | None:
    """Return the model that an optimizer trains, with the GradScaler; None if no module has its parameters.

    Every object is looked at once, by its `type`: `isinstance` would make proxies load what they stand for.

    Args:
        optimizer: The optimizer.
        former: Optimizers of finished trainings.
    """
    modules, optimizers, scalers = list[nn.Module](), [optimizer], list[Any]()
    for candidate in gc.get_objects():
        kind = type(candidate)
        if kind is Models:  # It belongs to another run.
            continue
        if issubclass(kind, nn.Module) and "_modules" in vars(candidate):  # otherwise it is still being created
            modules.append(candidate)
        elif issubclass(kind, torch.optim.Optimizer) and candidate is not optimizer and candidate not in former:
            optimizers.append(candidate)
        elif issubclass(kind, torch.amp.GradScaler) and candidate.is_enabled():
            scalers.append(candidate)
    models = outermost_models(modules, optimizers)
    if not models:
        return None
    model = models[0] if len(models) == 1 else Models(dict(zip(names_of(models), models, strict=True)))
    return Training(model, scalers[0] if scalers else None)


def outermost_models(modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> list[nn.Module]:
    """Return the outermost modules that have parameters of the optimizers; none if no module has the first one's.

    Args:
        modules: All modules.
        optimizers: The optimizers, with the one that steps first.
    """
    inner = {id(child) for module in modules for child in module.children()}
    # A compiled module also contains the parts of the original module.
    outermost = [each for each in modules if id(each) not in inner and not issubclass(type(each), torch.fx.GraphModule)]
    params = [(module, {id(param) for param in module.parameters()}) for module in outermost]
    models: list[nn.Module] = []
    for optimizer in optimizers:
        missing = owned_by(optimizer)
        while missing:
            model, trained = max(params, key=lambda pair: len(pair[1] & missing), default=(None, set[int]()))
            if model is None or not trained & missing:
                break
            missing -= trained
            if all(model is not other for other in models):
                models.append(model)
        if not models:
            break
    return models


def owned_by(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the ids of an optimizer's parameters; none if it is still being created."""
    return {id(param) for group in getattr(optimizer, "param_groups", ()) for param in group["params"]}


def names_of(models: Sequence[nn.Module]) -> list[str]:
    """Return a name for each model: the name of the script's variable, or of the class."""
    variables = {id(value): name for name, value in vars(sys.modules["__main__"]).items()}
    taken = dir(nn.ModuleDict)
    for model in models:
        taken.append(numbered(variables.get(id(model)) or type(model).__name__.lower(), taken))
    return taken[-len(models) :]
