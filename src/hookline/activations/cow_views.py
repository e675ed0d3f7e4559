"""Give observers copy-on-write views of tensors, which are copied at the first write."""

from __future__ import annotations

from typing import Any

import torch
from torch import is_grad_enabled
from torch._C import _data_address, _set_grad_enabled  # type: ignore[attr-defined]
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from hookline._tensors import map_tensors, tensor_version
from hookline.stats import loan

_NOT_SUPPORTED = (RuntimeError, AttributeError, NotImplementedError)  # What torch raises where it has no lazy clone.


def copy_on_write(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached view that becomes a copy at the first write on either side.

    It is a clone at once where torch cannot do that, and for a borrowed tensor, because torch does not see the writes
    of compiled code into its own buffers.
    """
    if loan.lenders and loan.on_loan():
        return tensor.detach().clone()
    grad = is_grad_enabled()
    if grad:
        _set_grad_enabled(False)  # Cheaper than detaching, and than the context manager.
    try:
        return tensor._lazy_clone()
    except _NOT_SUPPORTED:
        return tensor.detach().clone()
    finally:
        if grad:
            _set_grad_enabled(True)


def unwrap(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor inside one of `torch.func`, which other code can read: for `vmap` the whole batch."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def shares_memory(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    """Return whether neither a plain tensor nor its view was written to since, not even through `.data`."""
    try:
        return bool(_data_address(tensor) == _data_address(view))
    except RuntimeError:  # Tensors of `torch.func` have no memory.
        return False


class ViewTracker:
    """Makes copy-on-write views of nested values, and detects whether one of the views was written to."""

    def __init__(self) -> None:
        self._views: list[tuple[torch.Tensor, int]] = []  # With their versions.

    def view(self, value: Any) -> Any:
        """Return the same structure with every tensor replaced by its copy-on-write view."""
        return map_tensors(self._view, value)

    def _view(self, tensor: torch.Tensor) -> torch.Tensor:
        view = copy_on_write(tensor)
        self._views.append((view, tensor_version(view)))
        return view

    def written(self) -> bool:
        """Return whether any view was written to since it was made."""
        return any(tensor_version(view) != version for view, version in self._views)
