"""Give observers copy-on-write views of tensors, which are copied at the first write."""

from __future__ import annotations

from typing import Any

import torch

from hookline.stats import borrowed

_NOT_SUPPORTED = (RuntimeError, AttributeError, NotImplementedError)  # What torch raises where it has no lazy clone.
_functorch: Any = getattr(torch._C, "_functorch", None)
# `Tensor.data_ptr` gives the same address, but it materializes a view.
_data_address: Any = getattr(torch._C, "_data_address", torch.Tensor.data_ptr)


def copy_on_write(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached view that becomes a copy at the first write on either side.

    It is a clone at once where torch cannot do that, and for a borrowed tensor, because torch does not see the writes
    of compiled code into its own buffers.
    """
    if borrowed.threads and borrowed.is_borrowed():
        return tensor.detach().clone()
    try:
        # In grad mode the clone itself would become a node of the graph and keep it alive.
        return (tensor.detach() if torch.is_grad_enabled() else tensor)._lazy_clone()
    except _NOT_SUPPORTED:
        return tensor.detach().clone()


def unwrap(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor inside one of `torch.func`, which other code can read: for `vmap` the whole batch."""
    while _functorch is not None and _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def storage_size(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor's storage and its size in bytes; (an id, 0) for a tensor without storage."""
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        return id(tensor), 0
    start = _data_address(tensor) - int(tensor.storage_offset()) * tensor.element_size()
    return start, tensor.untyped_storage().nbytes()
