"""What observers get instead of the real tensors: copies that cost nothing until somebody writes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import is_grad_enabled
from torch._C import _data_address, _set_grad_enabled  # type: ignore[attr-defined]
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from hookline.stats import loan

Change = Callable[[torch.Tensor], torch.Tensor]

HOLDERS = ("transformers.cache_utils",)  # whose classes keep keys and values of attention in their attributes
CANNOT_BE_LAZY = (RuntimeError, AttributeError, NotImplementedError)  # what torch raises where it has no lazy copy


def copy_on_write(tensor: torch.Tensor) -> torch.Tensor:
    """A detached view that becomes a copy at the first write on either side.

    It is a clone at once where torch cannot do that, and for a tensor on loan, whose owner's writes torch does not see.
    """
    if loan.lenders and loan.on_loan():
        return tensor.detach().clone()
    grad = is_grad_enabled()
    if grad:
        _set_grad_enabled(False)  # cheaper than detaching, or than the context manager
    try:
        return tensor._lazy_clone()
    except CANNOT_BE_LAZY:
        return tensor.detach().clone()
    finally:
        if grad:
            _set_grad_enabled(True)


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor of `torch.func` holds, which can be read outside of the transform: under `vmap` the whole batch."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def shares_memory(tensor: torch.Tensor, made: torch.Tensor) -> bool:
    """Whether nobody has written to a plain tensor or its copy since that was made, not even through `.data`."""
    try:
        return bool(_data_address(tensor) == _data_address(made))
    except RuntimeError:  # tensors of `torch.func` have no memory of their own
        return False


def mapped(change: Change, value: Any) -> Any:
    """The same structure with every tensor changed.

    A container that cannot be made anew from its items (a defaultdict, for one) arrives as a plain one.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is tuple:  # positional inputs are one: by far the commonest
        return tuple([mapped(change, item) for item in value])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _remade(lambda items: type(value)(*items), tuple(mapped(change, item) for item in value))
    if isinstance(value, (tuple, list)):
        plain = tuple if isinstance(value, tuple) else list
        return _remade(type(value), plain(mapped(change, item) for item in value))
    if isinstance(value, Mapping):
        return _remade(type(value), {key: mapped(change, item) for key, item in value.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _with_fields(change, value)
    return _with_attributes(change, value) if holds_tensors(value) else value


def _with_fields(change: Change, value: Any) -> Any:
    """Copied without its constructor, which may ask for other things or do more than store them."""
    made = copy.copy(value)
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            object.__setattr__(made, field.name, mapped(change, getattr(value, field.name)))
    return made


def holds_tensors(value: Any) -> bool:
    """Whether an object is looked into: a cache of attention, which Hugging Face models take and give on."""
    kind = type(value)
    return kind.__module__ != "builtins" and any(base.__module__ in HOLDERS for base in kind.__mro__)


def _with_attributes(change: Change, value: Any) -> Any:
    made = copy.copy(value)
    vars(made).update({name: mapped(change, item) for name, item in vars(value).items()})
    return made


def _remade(make: Callable[[Any], Any], items: Any) -> Any:
    try:
        return make(items)
    except Exception:
        return items


class Copies:
    """Makes copies of nested outputs and remembers them, to see afterwards whether somebody wrote into one."""

    def __init__(self) -> None:
        self._made: list[tuple[torch.Tensor, int]] = []  # with their versions

    def of(self, value: Any) -> Any:
        """The same structure with every tensor replaced by its copy-on-write view."""
        return mapped(self._copy, value)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        made = copy_on_write(tensor)
        self._made.append((made, version_of(made)))
        return made

    def written(self) -> bool:
        """Whether any copy has been written into since it was made."""
        return any(version_of(tensor) != version for tensor, version in self._made)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor has been written to in place; inference tensors don't count."""
    try:
        return tensor._version
    except RuntimeError:
        return 0
