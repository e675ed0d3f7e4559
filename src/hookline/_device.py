"""Find a device, copy to it and from it without waiting, and ask it for streams, events, memory and random states.

Only this module and the Triton launchers know that the accelerator is CUDA: support for another kind of device starts
here. Only `find_device` initializes a device that the process has not used yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch

from hookline.errors import TrainingError, written

_ALREADY_CURRENT = nullcontext()


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device computes asynchronously, so that reading from it waits."""
    return device.type == "cuda"


def is_initialized() -> bool:
    """Return whether this process has used an accelerator."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def default_device() -> torch.device:
    """Return the current accelerator if there is one, otherwise the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def find_device(device: Any) -> torch.device:
    """Return the device that a user named; None means the accelerator if there is one, otherwise the CPU."""
    if device is None:
        return default_device()
    try:
        resolved = with_index(torch.device(device))
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0].rstrip(":")
        raise TrainingError(f"{written(device)} is not a device, such as 'cpu' or 'cuda:0': {reason}") from error
    try:
        torch.empty(0, device=resolved)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was compiled for the device
        reason = str(error).partition("\n")[0]
        raise TrainingError(f"{device!r} cannot be used here: {reason}; use another device, such as 'cpu'") from error
    return resolved


def with_index(device: torch.device) -> torch.device:
    """Return the device with an explicit index: ``cuda`` becomes ``cuda:0`` when that is the current one."""
    if is_accelerator(device) and device.index is None and torch.cuda.is_available():
        return torch.device(device.type, torch.cuda.current_device())
    return device


def set_device(index: int) -> None:
    """Make an accelerator the current one; its index is modulo their number, so that several ranks may share one."""
    torch.cuda.set_device(index % torch.cuda.device_count())


def device_indices(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the indices of the accelerators a step may use: the current one and those that hold the tensors."""
    if not is_initialized():
        return []
    devices = {tensor.device for tensor in tensors if is_accelerator(tensor.device)}
    return sorted({torch.cuda.current_device(), *(device.index for device in devices)})


def device_names() -> list[str]:
    """Return the names of the accelerators, empty if this process has not used one."""
    if not is_initialized():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


# ---- streams and events ----------------------------------------------------------------------------------------------


def use(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one inside the block; does nothing for the CPU."""
    # It is nearly always the current one already, and entering torch's context costs more than this check.
    if not is_accelerator(device) or device.index == torch.cuda.current_device():
        return _ALREADY_CURRENT
    return torch.cuda.device(device)


def stream_handle(device: torch.device) -> int:
    """Return the current stream as the integer that kernel launchers take; 0 for the CPU."""
    if not is_accelerator(device):
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    # Triton asks for the stream in the same way; it is ten times as fast as making a Stream object.
    return torch._C._cuda_getCurrentRawStream(index)


def record_event(device: torch.device) -> Any:
    """Record an event on the device's current stream; it has ``query()`` and ``synchronize()``."""
    return torch.cuda.current_stream(device).record_event()


def timing_event() -> Any:
    """Create an event that measures time: call ``record()`` on two of them, then ``first.elapsed_time(second)``."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def is_capturing() -> bool:
    """Return whether the current stream is recorded into a graph; querying or recording an event would break that."""
    return is_initialized() and torch.cuda.is_current_stream_capturing()


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait for the current stream of each accelerator among the devices."""
    for device in {device for device in devices if is_accelerator(device)}:
        torch.cuda.current_stream(device).synchronize()


# ---- copies to the device --------------------------------------------------------------------------------------------


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to a device in the order of its stream, through pinned memory so that the host never waits."""
    if is_accelerator(device) and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def upload(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make a tensor of the numbers on a device without waiting for it."""
    return to_device(torch.tensor(numbers, dtype=dtype, pin_memory=is_accelerator(device)), device)


def cached_table(device: torch.device, numbers: tuple[float, ...], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return the numbers as a tensor on a device; repeated calls share one read-only tensor.

    The addresses of a step's tensors are such numbers: memory that one step frees usually goes to the same tensors of
    the next step.
    """
    return _cached_table(device, stream_handle(device), numbers, dtype)


@lru_cache(maxsize=64)
def _cached_table(device: torch.device, stream: int, numbers: tuple[float, ...], dtype: torch.dtype) -> torch.Tensor:
    # The stream is part of the key because the table is filled in its order: another stream might read it too early.
    return upload(numbers, dtype, device)


# ---- copies to the host ----------------------------------------------------------------------------------------------

# Small copies share one buffer size: pinning new memory waits for the device, reusing the allocator's block does not.
_SMALLEST_BUFFER = 4096


class HostCopy:
    """A copy of a tensor to the host that may still be in progress.

    On CUDA the copy goes into pinned memory on the current stream, followed by an event, so neither the host nor the
    device waits. A tensor that is already on the host is not copied, only referenced.

    Args:
        tensor: The tensor to copy; later writes to it on the same stream do not change the copy.
        into: Host memory of the same shape and dtype to reuse.
    """

    def __init__(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> None:
        self._event: torch.Event | None = None
        self.host: torch.Tensor
        """The host tensor; its contents are valid once the copy is complete."""
        if not is_accelerator(tensor.device):
            self.host = tensor.to("cpu") if into is None else into.copy_(tensor)
        else:
            self.host = pinned_like(tensor) if into is None else into
            with use(tensor.device):
                self.host.copy_(tensor, non_blocking=True)
                self._event = record_event(tensor.device)

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


# ---- memory ----------------------------------------------------------------------------------------------------------


def memory_allocated(device: torch.device) -> int | None:
    """Return the bytes that tensors occupy on an accelerator, None on the CPU."""
    return torch.cuda.memory_allocated(device) if is_accelerator(device) else None


def max_memory_allocated(device: torch.device) -> int | None:
    """Return the largest number of bytes that tensors have occupied on an accelerator, None on the CPU."""
    return torch.cuda.max_memory_allocated(device) if is_accelerator(device) else None


def utilization(device: torch.device) -> float:
    """Return the share of time in which the device was busy, 0 to 1; raises if the driver does not report it."""
    return torch.cuda.utilization(device) / 100


# ---- random states ---------------------------------------------------------------------------------------------------


def generator(index: int) -> torch.Generator:
    """Return the default random generator of one accelerator."""
    return torch.cuda.default_generators[index]


def rng_states() -> list[torch.Tensor] | None:
    """Return the state of every accelerator's generator; None if this process has not used one."""
    return torch.cuda.get_rng_state_all() if torch.cuda.is_available() and is_initialized() else None


def set_rng_states(states: Sequence[torch.Tensor]) -> None:
    """Restore what `rng_states` returned; does nothing on a machine without an accelerator."""
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states)
