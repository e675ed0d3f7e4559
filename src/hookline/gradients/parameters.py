"""Select the parameters that an update hook sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hookline.errors import HooklineError
from hookline.registry.select import select

Parameters = Mapping[str, torch.nn.Parameter]


def select_parameters(pattern: Any, params: Parameters, model: torch.nn.Module | None) -> Parameters:
    """Return the parameters that a hook's `params` selects, in the model's order.

    Besides what `select` accepts, a pattern may be about modules: a module class, ``"class:Linear"`` or a module of the
    model selects the parameters of all matching modules, including those of their submodules. A tied weight is found
    under each of its names.

    Args:
        pattern: One pattern or several; None selects everything.
        params: The trained parameters by name.
        model: The model, for patterns about modules and for the other names of tied weights.

    Returns:
        `params` itself if everything is selected, otherwise a new mapping.

    Raises:
        HooklineError: If a pattern matches nothing; it lists the nearest names.
    """
    if pattern is None:
        return params
    patterns = pattern if isinstance(pattern, (list, tuple, set, frozenset)) else [pattern]
    if not patterns:
        raise HooklineError(f"params={pattern!r} selects nothing; leave params out to select all")
    selected: set[str] = set()
    for one in patterns:
        selected |= _in_modules(one, params, model) if _is_about_modules(one) else _by_name(one, params, model)
    return {name: param for name, param in params.items() if name in selected}


def _is_about_modules(pattern: Any) -> bool:
    if isinstance(pattern, type):
        return not issubclass(pattern, torch.Tensor)
    return isinstance(pattern, torch.nn.Module) or (isinstance(pattern, str) and pattern.startswith("class:"))


def _by_name(pattern: Any, params: Parameters, model: torch.nn.Module | None) -> set[str]:
    if model is None or not isinstance(pattern, str):
        return set(select(pattern, params, "parameter"))
    # `params` has one of the names of a tied weight, so the others are looked up by identity.
    trained = {id(param): name for name, param in params.items()}
    named = model.named_parameters(remove_duplicate=False)
    others = {name: param for name, param in named if id(param) in trained}
    return {trained[id(param)] for param in select(pattern, {**params, **others}, "parameter").values()}


def _in_modules(pattern: Any, params: Parameters, model: torch.nn.Module | None) -> set[str]:
    if model is None:
        raise HooklineError(f"params={pattern!r} is about modules, but this chain was made without a model")
    modules = select(pattern, dict(model.named_modules()), "module")
    # By identity, so that a tied weight is found through each of the modules that share it.
    inside = {id(param) for module in modules.values() for param in module.parameters()}
    found = {name for name, param in params.items() if id(param) in inside}
    if not found:
        raise HooklineError(f"params={pattern!r} matches {next(iter(modules))!r} and others, none of which is trained")
    return found
