"""What looking at attention costs: maps, bytes, and seconds on the device that does it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch


class AttentionCost:
    """What looking at attention has cost, beside what the model does anyway."""

    def __init__(self) -> None:
        self.maps = 0
        self.bytes = 0
        """Of the maps as they were made, batch x heads x queries x keys numbers each."""
        self.watch = Stopwatch()

    @property
    def seconds(self) -> float:
        """Spent on making and keeping them, on the device that did; waits for it."""
        return self.watch.seconds

    def __str__(self) -> str:
        return f"{self.maps} maps, {self.bytes:,} bytes, {self.seconds:.3f} s"


class Stopwatch:
    """Adds up pieces of work. A GPU's are timed on the GPU, to which the host only hands them over."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._under_way: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def timing(self, device: torch.device) -> Iterator[None]:
        """Time what is done in the block, on this device."""
        if device.type != "cuda":
            began = perf_counter()
            yield
            self._seconds += perf_counter() - began
            return
        first, last = _event(), _event()
        first.record()
        yield
        last.record()
        self._under_way.append((first, last))

    @property
    def seconds(self) -> float:
        """All of it so far; waits for the GPU, where there is one."""
        done, self._under_way = self._under_way, []
        for first, last in done:
            last.synchronize()
            self._seconds += first.elapsed_time(last) / 1e3
        return self._seconds


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
