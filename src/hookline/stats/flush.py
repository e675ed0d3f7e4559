"""Bringing finished rows to the host: copied behind the computation, picked up when they have arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Arrival(NamedTuple):
    """Rows on the host, with the step and the keys that they belong to."""

    step: int
    keys: Sequence[Hashable]
    rows: Tensor


class Flush:
    """A queue of copies from the device, each tagged with its step; they arrive in the order they were sent.

    On CUDA a copy goes into pinned memory behind an event, in the order of the stream that made the rows, so that the
    device needs no wait and the host only one in `drain`. Rows already on the host have arrived when they are sent.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Arrival, torch.cuda.Event | None]] = deque()

    def __len__(self) -> int:
        """How many have been sent and not picked up."""
        return len(self._waiting)

    def send(self, step: int, keys: Sequence[Hashable], rows: Tensor) -> None:
        """Start the copy of the rows of one step, made without gradients; nothing waits."""
        host, event = _start_copy(rows)
        self._waiting.append((Arrival(step, keys, host), event))

    def ready(self) -> Iterator[Arrival]:
        """What has arrived, oldest first; never waits."""
        while self._waiting and _has_arrived(self._waiting[0][1]):
            yield self._waiting.popleft()[0]

    def drain(self) -> Iterator[Arrival]:
        """Everything that was sent, oldest first; waits for what is still on its way."""
        while self._waiting:
            arrival, event = self._waiting.popleft()
            if event is not None:
                event.synchronize()
            yield arrival


def _start_copy(rows: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    if rows.is_cpu:
        return rows, None
    if rows.device.type != "cuda":
        return rows.to("cpu"), None
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    with torch.cuda.device(rows.device):
        host.copy_(rows, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
    return host, event


def _has_arrived(event: torch.cuda.Event | None) -> bool:
    return event is None or bool(event.query())  # type: ignore[no-untyped-call]
