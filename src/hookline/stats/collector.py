"""Gathering tensors while a model runs, to read them all in one launch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hookline.stats import loan
from hookline.stats.statistics import summarize

LIMIT_BYTES = 256 * 1024 * 1024
Measure = Callable[[Sequence[Tensor], Sequence[object]], Tensor]
"""Tensors and their names in, one row for each out, all on one device."""


class Summary(NamedTuple):
    """What was gathered: a key and a row of statistics for each tensor, in the order they came."""

    keys: list[Hashable]
    rows: Tensor


class Collector:
    """Keeps references to tensors and reads them together: at `finish`, or when they begin to cost memory.

    A launch per tensor would cost more on the host than reading the tensor costs on the device. In training the
    backward pass keeps most outputs anyway; what nobody else keeps, as in evaluation, may come to `limit_bytes`.

    A tensor that is written to between `add` and the launch has lost the values that were meant. Its version counter
    tells: it gets no row, its key is in `overwritten`, and from the next time on it is read as soon as it is added.
    Inference tensors and writes through `.data` have no version: pass `now=True` for those that will be overwritten.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES, measure: Measure | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._measure = measure or summarize
        self.overwritten: set[Hashable] = set()
        self._done: list[Summary] = []
        self._start_anew()

    def __len__(self) -> int:
        """How many tensors have been added since the last `finish`."""
        return len(self._keys) + sum(len(summary.keys) for summary in self._done)

    def add(self, key: Hashable, tensor: Tensor, now: bool = False) -> None:
        """Gather one tensor; `now` reads what waits at once, because the tensor is about to be overwritten.

        One on loan always is, but a launch for each would cost the host more than a copy costs the device.
        """
        if loan.lenders and loan.on_loan():
            tensor = tensor.clone()
        self._keys.append(key)
        self._tensors.append(tensor)
        self._versions.append(version_of(tensor))
        self._bytes += tensor.nbytes
        if now or key in self.overwritten:
            self.read()
        elif self._bytes > self._look_at:
            self._look()

    def read(self) -> None:
        """Queue the launch for what waits, and let go of it."""
        if not self._keys:
            return
        keys, tensors, versions = self._keys, self._tensors, self._versions
        self._start_anew()
        current = [version_of(tensor) for tensor in tensors]
        if current != versions:
            keys, tensors = self._without_overwritten(keys, tensors, versions, current)
        if keys:
            self._done.append(Summary(keys, self._measure(tensors, keys)))

    def finish(self) -> Summary:
        """Read what still waits and hand over everything since the last time; the rows stay on the device."""
        self.read()
        done, self._done = self._done, []
        if len(done) == 1:
            return done[0]
        rows = torch.cat([summary.rows for summary in done]) if done else summarize([])
        return Summary([key for summary in done for key in summary.keys], rows)

    def discard(self) -> None:
        """Forget everything that was gathered, as after a forward pass that failed."""
        self._done = []
        self._start_anew()

    def _start_anew(self) -> None:
        self._keys: list[Hashable] = []
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []
        self._bytes = 0
        self._look_at = self.limit_bytes
        self._looked = 0  # how many of the tensors have been looked at
        self._alone: list[Tensor] = []  # those of them that nobody else kept

    def _look(self) -> None:
        """Read if what only we keep alive comes near the limit; what the backward pass keeps costs nothing.

        That stays kept while the model runs, so only new tensors and those found alone are looked at.
        """
        self._alone = [tensor for tensor in self._alone + self._tensors[self._looked :] if is_ours_alone(tensor)]
        self._looked = len(self._tensors)
        self._look_at = self._bytes + self.limit_bytes // 2
        if sum(tensor.nbytes for tensor in self._alone) > self.limit_bytes // 2:
            self.read()

    def _without_overwritten(
        self, keys: list[Hashable], tensors: list[Tensor], versions: list[int], current: list[int]
    ) -> tuple[list[Hashable], list[Tensor]]:
        intact = [before == now for before, now in zip(versions, current, strict=True)]
        self.overwritten.update(key for key, same in zip(keys, intact, strict=True) if not same)
        kept = [(key, tensor) for key, tensor, same in zip(keys, tensors, intact, strict=True) if same]
        return [key for key, _ in kept], [tensor for _, tensor in kept]


def version_of(tensor: Tensor) -> int:
    """How often the tensor was written in place; inference tensors don't count, so theirs is always 0."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def is_ours_alone(tensor: Tensor) -> bool:
    """Whether the backward pass does not keep the tensor or its memory; True where torch does not tell.

    Without gradients a use by others, such as a view that is alive just now, says nothing about what comes later.
    """
    if not tensor.requires_grad:
        return True
    try:
        uses: int = tensor._use_count()  # type: ignore[attr-defined]
        return uses == 1 and torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= 2
    except AttributeError:
        return True
