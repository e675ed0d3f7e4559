"""What the calls of a module cost."""

from __future__ import annotations

import threading
from time import perf_counter_ns

import torch

from hookline.activations.moment import Measured

MOST_NESTED = 100


class Meter(threading.local):
    """Measures the calls of one module: a stack, because it may run inside itself, and one in each thread."""

    def __init__(self) -> None:
        self._begun: list[tuple[int, int]] = []

    def begin(self, module: torch.nn.Module) -> None:
        """The module is about to run."""
        if len(self._begun) > MOST_NESTED:  # calls that ended in an exception have left their beginnings here
            self._begun.clear()
        self._begun.append((perf_counter_ns(), _allocated(module)))

    def end(self, module: torch.nn.Module) -> Measured | None:
        """What the call cost, if its beginning was seen."""
        if not self._begun:
            return None
        began, allocated = self._begun.pop()
        now = _allocated(module) if allocated >= 0 else -1
        return Measured((perf_counter_ns() - began) / 1e9, now - allocated if now >= 0 else -1)


def _allocated(module: torch.nn.Module) -> int:
    """Bytes allocated on the module's CUDA device; -1 where there is no such count."""
    parameter = next(module.parameters(), None)
    if parameter is None or parameter.device.type != "cuda":
        return -1
    return torch.cuda.memory_allocated(parameter.device)
