"""Give observers copy-on-write views of tensors, which are copied at the first write."""

from __future__ import annotations

from typing import Any

import torch

from hookline import _tensors
from hookline._tensors import clone_tensor
from hookline.stats import borrowed

# `Tensor.data_ptr` gives the same address, but it materializes a view.
_data_address: Any = getattr(torch._C, "_data_address", torch.Tensor.data_ptr)


def observer_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return what `_tensors.copy_on_write` does, also of a borrowed tensor; None if it cannot be copied.

    A borrowed tensor is cloned at once, because torch does not see the writes of compiled code into its own buffers.
    """
    if borrowed.threads and borrowed.is_borrowed():
        return clone_tensor(tensor)
    return _tensors.copy_on_write(tensor)


def storage_size(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor's storage and its size in bytes; (an id, 0) for a tensor without storage."""
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        return id(tensor), 0
    start = _data_address(tensor) - int(tensor.storage_offset()) * tensor.element_size()
    return start, tensor.untyped_storage().nbytes()
