"""What observers get instead of the real tensors: copies that cost nothing until somebody writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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
        self._made: list[tuple[torch.Tensor, int]] = []

    def of(self, value: Any) -> Any:
        """The same structure with every tensor replaced by its copy-on-write view."""
        if isinstance(value, torch.Tensor):
            made = copy_on_write(value)
            self._made.append((made, _version(made)))
            return made
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.of(item) for item in value))
        if isinstance(value, (tuple, list)):
            return type(value)(self.of(item) for item in value)
        if isinstance(value, Mapping):
            items = {key: self.of(item) for key, item in value.items()}
            return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: self.of(getattr(value, field.name)) for field in dataclasses.fields(value)}
            return dataclasses.replace(value, **fields)
        return value

    def written(self) -> bool:
        """Whether any copy has been written into since it was made."""
        return any(_version(tensor) != version for tensor, version in self._made)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
