"""Name modules, parameters and saved tensors as the model itself does, even if it or a part of it is wrapped.

`torch.compile`, data parallelism, FSDP and activation checkpointing put a module around another one, and its attribute
becomes part of every name below it. Patterns, records, checkpoints and averages use the names without these parts.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    for base in type(module).__mro__:
        if attribute := _WRAPPERS.get((base.__module__, base.__name__)):
            return attribute
    return None


def unwrap_module(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside all wrappers; a module that is not wrapped is returned unchanged."""
    while (attribute := _inner_attribute(module)) is not None:
        module = getattr(module, attribute)
    return module


def plain_name(model: torch.nn.Module, name: str) -> str:
    """Return the name of a module, parameter, buffer or state_dict entry without the parts that wrappers add."""
    module: Any = model
    parts, plain = name.split("."), []
    while parts:
        attribute = _inner_attribute(module)
        if attribute is not None:
            module = getattr(module, attribute)
            if parts[0] == attribute:  # Some wrappers leave themselves out of the names in a state_dict.
                del parts[0]
        else:
            part = parts.pop(0)
            plain.append(part)
            module = getattr(module, part, None) if parts else None
    return ".".join(plain)


def plain_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the same as `named_modules`, under plain names and without the wrappers."""
    named = dict(model.named_modules())
    inside = {name: module for name, module in named.items() if _inner_attribute(module) is None}
    return inside if len(inside) == len(named) else _with_plain_names(model, inside)


def plain_parameters(model: torch.nn.Module, remove_duplicate: bool = True) -> dict[str, torch.nn.Parameter]:
    """Return the same as `named_parameters`, under plain names."""
    return _with_plain_names(model, dict(model.named_parameters(remove_duplicate=remove_duplicate)))


def plain_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the same as `named_buffers`, under plain names."""
    return _with_plain_names(model, dict(model.named_buffers()))


def plain_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """Return the model's `state_dict` under plain names."""
    return _with_plain_names(model, model.state_dict())


def load_plain_state_dict(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `plain_state_dict` returned for this model, even if it was wrapped differently then.

    Raises:
        RuntimeError: If names or shapes do not fit, as in the model's own `load_state_dict`.
    """
    names = {plain_name(model, name): name for name in model.state_dict()}
    model.load_state_dict({names.get(name, name): value for name, value in state.items()})


def _with_plain_names(model: torch.nn.Module, named: dict[str, Value]) -> dict[str, Value]:
    if all(_inner_attribute(module) is None for module in model.modules()):
        return named
    return {plain_name(model, name): value for name, value in named.items()}
