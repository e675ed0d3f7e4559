"""Walk over nested structures of tensors, and read the version of a tensor.

Batches, module inputs and outputs nest tensors in tuples, lists, mappings, dataclasses and the attention caches of
Hugging Face models. Every part of Hookline that looks into such a structure uses these functions.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

# Classes of these modules keep keys and values of attention in attributes, possibly nested.
_CACHE_MODULES = ("transformers.cache_utils",)


def iter_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in a nested structure, in order."""
    for _, tensor in tensors_with_keys(value):
        yield tensor


def tensors_with_keys(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Yield every tensor in a nested structure with the keys that lead to it, outermost first."""
    if isinstance(value, torch.Tensor):
        yield keys, value
        return
    for key, item in _children(value):
        yield from tensors_with_keys(item, (*keys, key))


def count_samples(batch: Any) -> int:
    """Return the first dimension of a batch's first tensor; 1 if there is none."""
    first = batch[0] if type(batch) in (tuple, list) and batch else batch
    if type(first) is torch.Tensor:  # The most common case.
        return first.size(0) if first.dim() else 1
    tensor = next(iter_tensors(batch), None)
    return int(tensor.shape[0]) if tensor is not None and tensor.dim() else 1


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return the same structure with every tensor replaced by ``function(tensor)``.

    Dict subclasses keep their other state (a default factory, the attributes of a model output). A container whose
    class cannot be rebuilt from its items becomes a plain one.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) is tuple:  # positional inputs are tuples, by far the most common case
        return tuple([map_tensors(function, item) for item in value])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _rebuild(lambda items: type(value)(*items), tuple(map_tensors(function, item) for item in value))
    if isinstance(value, (tuple, list)):
        plain = tuple if isinstance(value, tuple) else list
        return _rebuild(type(value), plain(map_tensors(function, item) for item in value))
    if isinstance(value, Mapping):
        items = {key: map_tensors(function, item) for key, item in value.items()}
        if type(value) is dict:
            return items
        make: Any = partial(_updated, value) if isinstance(value, dict) else type(value)
        return _rebuild(make, items)
    attributes = _children(value)
    if not attributes:
        return value
    # Copied without its constructor, which may require other arguments or do more than store them.
    made = copy.copy(value)
    for key, item in attributes:
        object.__setattr__(made, key, map_tensors(function, item))
    return made


def tensor_version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was modified in place; 0 for inference tensors, which do not count."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    kind = type(value)
    is_cache = kind.__module__ != "builtins" and any(base.__module__ in _CACHE_MODULES for base in kind.__mro__)
    return list(vars(value).items()) if is_cache else []


def _updated(value: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    made = copy.copy(value)
    for key, item in items.items():
        made[key] = item  # not `update`, which skips a subclass's own `__setitem__`
    return made


def _rebuild(make: Callable[[Any], Any], items: Any) -> Any:
    try:
        return make(items)
    except Exception:  # the class's constructor takes something else
        return items
