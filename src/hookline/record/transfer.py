"""Bringing tensors from a device to the host without waiting: one copy for a table, and one for many scalars."""

from __future__ import annotations

from typing import Any

import torch

_PINNED_BYTES = 4096  # one size for all usual copies: pinning new memory waits for the device, reusing does not


class HostCopy:
    """A tensor on its way to the host: on CUDA into pinned memory behind an event, so that nothing waits."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor if tensor.is_cpu else self._start(tensor) if tensor.is_cuda else tensor.to("cpu")

    def has_arrived(self) -> bool:
        """Whether it is on the host; never waits."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def tensor(self) -> torch.Tensor:
        """The tensor on the host; waits until it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host

    def _start(self, tensor: torch.Tensor) -> torch.Tensor:
        needed = tensor.numel() * tensor.element_size()
        pinned = torch.empty(max(needed, _PINNED_BYTES), dtype=torch.uint8, device="cpu", pin_memory=True)
        host = pinned[:needed].view(tensor.dtype).view(tensor.shape)
        with torch.cuda.device(tensor.device):
            host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        return host


class Transfer:
    """One copy of many scalars, whatever their dtypes: their bytes travel together and part on arrival."""

    def __init__(self, scalars: list[torch.Tensor]) -> None:
        self._count = len(scalars)
        self._places = _by_dtype(scalars)
        packed = _pack([[scalars[place] for place in places] for places in self._places.values()])
        self._copy = HostCopy(packed)

    def has_arrived(self) -> bool:
        """Whether the numbers are on the host; never waits."""
        return self._copy.has_arrived()

    def numbers(self) -> list[Any]:
        """The values in the order given, integers as ints, booleans as bools; waits until they are there."""
        packed = self._copy.tensor()
        numbers: list[Any] = [None] * self._count
        start = 0
        for dtype, places in self._places.items():
            end = start + len(places) * dtype.itemsize
            for place, number in zip(places, _unpack(packed[start:end], dtype), strict=True):
                numbers[place] = number
            start = end
        return numbers


def _by_dtype(scalars: list[torch.Tensor]) -> dict[torch.dtype, list[int]]:
    """Places per dtype, the widest first: then every part of the packed bytes is aligned for its dtype."""
    places: dict[torch.dtype, list[int]] = {}
    for place, scalar in enumerate(scalars):
        places.setdefault(scalar.dtype, []).append(place)
    return dict(sorted(places.items(), key=lambda item: -item[0].itemsize))


def _pack(groups: list[list[torch.Tensor]]) -> torch.Tensor:
    parts = [torch.stack(group).view(torch.uint8) for group in groups]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _unpack(packed: torch.Tensor, dtype: torch.dtype) -> list[Any]:
    values = packed.view(dtype)
    return (values.float() if dtype.is_floating_point and dtype.itemsize < 4 else values).tolist()
