"""What observers get instead of the real tensors: copies that cost nothing until somebody writes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch


def copy_on_write(tensor: torch.Tensor) -> torch.Tensor:
    """A detached view that becomes a copy at the first write on either side; a clone where torch cannot do that."""
    try:
        return tensor.detach()._lazy_clone()
    except (RuntimeError, AttributeError, NotImplementedError):
        return tensor.detach().clone()


class Copies:
    """Makes copies of nested outputs and remembers them, to see afterwards whether somebody wrote into one."""

    def __init__(self) -> None:
        self._made: list[torch.Tensor] = []

    def of(self, value: Any) -> Any:
        """The same structure with every tensor replaced by its copy-on-write view.

        A container that cannot be made anew from its items (a defaultdict, for one) arrives as a plain one.
        """
        if isinstance(value, torch.Tensor):
            made = copy_on_write(value)
            self._made.append(made)
            return made
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return _remade(lambda items: type(value)(*items), tuple(self.of(item) for item in value))
        if isinstance(value, (tuple, list)):
            plain = tuple if isinstance(value, tuple) else list
            return _remade(type(value), plain(self.of(item) for item in value))
        if isinstance(value, Mapping):
            return _remade(type(value), {key: self.of(item) for key, item in value.items()})
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._of_fields(value)
        return value

    def _of_fields(self, value: Any) -> Any:
        """Copied without its constructor, which may ask for other things or do more than store them."""
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(made, field.name, self.of(getattr(value, field.name)))
        return made

    def written(self) -> bool:
        """Whether any copy has been written into since it was made."""
        return any(version_of(tensor) for tensor in self._made)  # a new tensor's version is 0


def _remade(make: Callable[[Any], Any], items: Any) -> Any:
    try:
        return make(items)
    except Exception:
        return items


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor has been written to in place; inference tensors don't count."""
    return 0 if tensor.is_inference() else tensor._version
