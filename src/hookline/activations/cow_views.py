"""Give observers copy-on-write views of tensors, which are copied at the first write."""

from __future__ import annotations

from typing import Any

import torch

from hookline._tensors import clone_tensor, is_wrapped
from hookline.stats import borrowed

_NOT_SUPPORTED = (RuntimeError, AttributeError, NotImplementedError)  # What torch raises where it has no lazy clone.
# `Tensor.data_ptr` gives the same address, but it materializes a view.
_data_address: Any = getattr(torch._C, "_data_address", torch.Tensor.data_ptr)


def copy_on_write(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a detached view that becomes a copy at the first write on either side.

    It is a clone at once where torch cannot do that, and for a borrowed tensor, because torch does not see the writes
    of compiled code into its own buffers. It is None for a tensor that cannot be copied.
    """
    # Of a quantized tensor, torch makes a lazy clone without a quantizer, and reading that ends the process. Under
    # `vmap` it makes one of each sample and warns. A subclass need not support it.
    is_lazy = type(tensor) is torch.Tensor and not tensor.is_quantized and not is_wrapped(tensor)
    if is_lazy and not (borrowed.threads and borrowed.is_borrowed()):
        try:
            # In grad mode the clone itself would become a node of the graph and keep it alive.
            return (tensor.detach() if torch.is_grad_enabled() else tensor)._lazy_clone()
        except _NOT_SUPPORTED:
            pass
    return clone_tensor(tensor)


def storage_size(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor's storage and its size in bytes; (an id, 0) for a tensor without storage."""
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        return id(tensor), 0
    start = _data_address(tensor) - int(tensor.storage_offset()) * tensor.element_size()
    return start, tensor.untyped_storage().nbytes()
