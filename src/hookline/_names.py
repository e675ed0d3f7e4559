"""Name modules, parameters and saved tensors as the model itself does, whatever wraps it or a part of it.

`torch.compile`, data parallelism, FSDP and activation checkpointing put a module around another one, and its attribute
becomes part of every name below it. Patterns, records, checkpoints and averages use the names without these parts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any, TypeVar

import torch

Value = TypeVar("Value")

# The wrapper classes, which are not imported for this, and the attribute of the module inside.
_WRAPPERS = {
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "module",
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): "_fsdp_wrapped_module",
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"): "_checkpoint_wrapped_module",
}


def _inner_attribute(module: Any) -> str | None:
    """Return the attribute in which a wrapper keeps the module it wraps; None for any other module."""
    kind: Any = type(module)
    return _inner_attribute_of(kind)


@lru_cache(maxsize=1024)
def _inner_attribute_of(kind: type) -> str | None:
    found = (_WRAPPERS.get((base.__module__, base.__name__)) for base in kind.__mro__)
    return next((attribute for attribute in found if attribute is not None), None)


def unwrap_module(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside of all wrappers; a module that is not wrapped as it is."""
    while (attribute := _inner_attribute(module)) is not None:
        module = getattr(module, attribute)
    return module


def plain_name(model: torch.nn.Module, name: str) -> str:
    """Return the name of a module, parameter, buffer or state_dict entry without the parts that wrappers add."""
    module: Any = model
    parts, kept = name.split("."), []
    while parts:
        attribute = _inner_attribute(module)
        if attribute is not None:
            module = getattr(module, attribute)
            if parts[0] == attribute:  # Some wrappers leave themselves out of the names in a state_dict.
                del parts[0]
        else:
            part = parts.pop(0)
            kept.append(part)
            module = getattr(module, part, None) if parts else None
    return ".".join(kept)


def _has_wrappers(model: torch.nn.Module) -> bool:
    return any(_inner_attribute(module) is not None for module in model.modules())


def plain_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return what `named_modules` does, under plain names and without the wrappers."""
    named = dict(model.named_modules())
    inside = {name: module for name, module in named.items() if _inner_attribute(module) is None}
    return inside if len(inside) == len(named) else _with_plain_names(model, inside)


def plain_parameters(model: torch.nn.Module, remove_duplicate: bool = True) -> dict[str, torch.nn.Parameter]:
    """Return what `named_parameters` does, under plain names."""
    return _with_plain_names(model, dict(model.named_parameters(remove_duplicate=remove_duplicate)))


def plain_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what `named_buffers` does, under plain names."""
    return _with_plain_names(model, dict(model.named_buffers()))


def plain_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """Return the model's `state_dict` under plain names."""
    return _with_plain_names(model, model.state_dict())


def load_plain_state_dict(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `plain_state_dict` returned for this model, wrapped in another way or not at all.

    Raises:
        RuntimeError: As `load_state_dict` of the model, if names or shapes do not fit.
    """
    names = {plain_name(model, name): name for name in model.state_dict()}
    model.load_state_dict({names.get(name, name): value for name, value in fit_names(state, names).items()})


def fit_names(saved: Mapping[str, Value], names: Collection[str]) -> dict[str, Value]:
    """Return saved values by plain name, also if they were saved under the names of a wrapped model, as 0.1 did.

    Args:
        saved: What was saved; only its names tell how the model was wrapped.
        names: The plain names that are expected. A saved name that is one of them is left alone.

    Returns:
        The same values; a name that fits in no way is kept.
    """
    # The parts of a wrapper's name may also be names of the model's, so they are left out of both sides.
    by_shortened = {_shortened(name): name for name in names}
    return {name if name in names else by_shortened.get(_shortened(name), name): value for name, value in saved.items()}


def _shortened(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS.values())


def _with_plain_names(model: torch.nn.Module, named: dict[str, Value]) -> dict[str, Value]:
    return {plain_name(model, name): value for name, value in named.items()} if _has_wrappers(model) else named
