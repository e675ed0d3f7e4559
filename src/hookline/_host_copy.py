"""Copy tensors from a device to the host without waiting for the device."""

from __future__ import annotations

import torch

from hookline import _device

# Small copies share one buffer size: pinning new memory waits for the device, reusing the allocator's block does not.
_SMALLEST_BUFFER = 4096


class HostCopy:
    """A copy of a tensor to the host that may still be in progress.

    On CUDA the copy goes into pinned memory on the current stream, followed by an event, so neither the host nor the
    device waits. A tensor that is already on the host is referred to, not copied.

    Args:
        tensor: The tensor to copy; what is written to it later on the same stream does not change the copy.
        into: Host memory of the same shape and dtype to reuse.
    """

    def __init__(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> None:
        self._event: torch.Event | None = None
        self.host: torch.Tensor
        """The host tensor; its contents are valid once the copy is complete."""
        if not _device.is_accelerator(tensor.device):
            self.host = tensor.to("cpu") if into is None else into.copy_(tensor)
        else:
            self.host = pinned_like(tensor) if into is None else into
            with _device.use(tensor.device):
                self.host.copy_(tensor, non_blocking=True)
                self._event = _device.record_event(tensor.device)

    def is_ready(self) -> bool:
        """Return whether the copy is complete; never waits."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> torch.Tensor:
        """Wait until the copy is complete and return the host tensor."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self.host


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Allocate pinned host memory with a tensor's shape and dtype."""
    size = tensor.numel() * tensor.element_size()
    buffer = torch.empty(max(size, _SMALLEST_BUFFER), dtype=torch.uint8, device="cpu", pin_memory=True)
    return buffer[:size].view(tensor.dtype).view(tensor.shape)
