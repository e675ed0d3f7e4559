"""Collect tensors while a model runs, measure them together, and bring one row per key and step to the host later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline._host_copy import HostCopy
from hookline._tensors import tensor_version
from hookline.stats import borrowed
from hookline.stats.columns import COUNT
from hookline.stats.merge import merge_rows
from hookline.stats.rows import summarize

LIMIT_BYTES = 256 * 1024 * 1024
MOST_COLLECTED = 4096  # tensors; small ones cost more in bookkeeping than in memory
STEPS_TOGETHER = 8  # steps whose rows are copied to the host together; without steps, as many batches of rows

Measure = Callable[[Sequence[Tensor], Sequence[object]], Tensor]
"""Takes tensors on one device and their names, and returns one row for each."""


class KeyedRows(NamedTuple):
    """A key and a statistics row for each collected tensor, in the order in which they were added."""

    keys: list[Hashable]
    rows: Tensor


class Collector:
    """Keeps references to tensors and measures them together: at `finish`, or when they begin to cost memory.

    A launch per tensor would cost more on the host than reading the tensor costs on the device. In training the
    backward pass keeps most outputs alive anyway; those that only the collector keeps, as in evaluation, may take
    `limit_bytes`.

    A tensor that is written to between `add` and the launch has lost the values that were meant. Its version shows
    that: it gets no row, its key is in `overwritten`, and from then on it is read as soon as it is added. Inference
    tensors and writes through `.data` have no version: pass `now=True` for tensors that will be overwritten.

    Args:
        limit_bytes: The memory that tensors may take which nothing else keeps alive.
        measure: Computes the rows; `summarize` by default.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES, measure: Measure | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._measure = measure or summarize
        self.overwritten: set[Hashable] = set()
        self._done: list[KeyedRows] = []
        self._reset()

    def _reset(self) -> None:
        self._keys: list[Hashable] = []
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []
        self._bytes = 0
        self._next_check = self.limit_bytes
        self._checked = 0  # how many of the tensors were checked
        self._only_here: list[Tensor] = []  # those of them that nothing else kept alive

    def __len__(self) -> int:
        """Return how many tensors have been added since the last `finish`."""
        return len(self._keys) + sum(len(done.keys) for done in self._done)

    def add(self, key: Hashable, tensor: Tensor, now: bool = False) -> None:
        """Collect a tensor, whose row gets the key; `now` reads it at once, because it is about to be overwritten."""
        if borrowed.threads and borrowed.is_borrowed():
            # It will be overwritten, but a launch for each would cost the host more than a copy costs the device.
            tensor = tensor.clone()
        self._keys.append(key)
        self._tensors.append(tensor)
        self._versions.append(tensor_version(tensor))
        self._bytes += tensor.nbytes
        if now or key in self.overwritten:
            self.read()
        elif self._bytes > self._next_check:
            self._check_memory()

    def _check_memory(self) -> None:
        """Read if the tensors that only this collector keeps alive come near the limit."""
        # What the backward pass keeps stays alive while the model runs, so that only new tensors and those that nothing
        # else kept are checked.
        new = self._tensors[self._checked :]
        self._only_here = [tensor for tensor in self._only_here + new if is_sole_owner(tensor)]
        self._checked = len(self._tensors)
        self._next_check = self._bytes + self.limit_bytes // 2
        if sum(tensor.nbytes for tensor in self._only_here) > self.limit_bytes // 2:
            self.read()

    def read(self) -> None:
        """Launch the measurement of the tensors that wait, and drop the references to them."""
        if not self._keys:
            return
        keys, tensors, versions = self._keys, self._tensors, self._versions
        self._reset()
        intact = [before == tensor_version(tensor) for before, tensor in zip(versions, tensors, strict=True)]
        if not all(intact):
            self.overwritten.update(key for key, same in zip(keys, intact, strict=True) if not same)
            keys = [key for key, same in zip(keys, intact, strict=True) if same]
            tensors = [tensor for tensor, same in zip(tensors, intact, strict=True) if same]
        if keys:
            self._done.append(KeyedRows(keys, self._measure(tensors, keys)))

    def finish(self) -> KeyedRows:
        """Read the tensors that wait and return all rows since the last call; they stay on the device."""
        self.read()
        done, self._done = self._done, []
        if len(done) == 1:
            return done[0]
        rows = torch.cat([some.rows for some in done]) if done else summarize([])
        return KeyedRows([key for some in done for key in some.keys], rows)

    def discard(self) -> None:
        """Forget everything that was collected, as after a forward pass that failed."""
        self._done = []
        self._reset()


def is_sole_owner(tensor: Tensor) -> bool:
    """Return whether the backward pass keeps neither a tensor nor its memory; True if torch cannot tell.

    Without gradients, another use such as a view that exists at the moment says nothing about what comes later.
    """
    if not tensor.requires_grad:
        return True
    try:
        uses: int = tensor._use_count()  # type: ignore[attr-defined]
        return uses == 1 and torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= 2
    except AttributeError:
        return True


# ---- rows on their way to the host -----------------------------------------------------------------------------------


class HostRows(NamedTuple):
    """Rows on the host, with the step and the keys that they belong to."""

    step: int
    keys: Sequence[Any]
    rows: Tensor


class HostQueue:
    """A queue of rows that are copied to the host in the background; they arrive in the order they were sent."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Sequence[Any], HostCopy]] = deque()

    def __len__(self) -> int:
        """Return how many were sent and not yet returned."""
        return len(self._waiting)

    def send(self, step: int, keys: Sequence[Any], rows: Tensor) -> None:
        """Start the copy of the rows of one step; nothing waits."""
        self._waiting.append((step, keys, HostCopy(rows)))

    def ready(self) -> Iterator[HostRows]:
        """Yield what has arrived, oldest first; never waits."""
        while self._waiting and self._waiting[0][2].is_ready():
            yield self._next()

    def drain(self) -> Iterator[HostRows]:
        """Yield everything that was sent, oldest first; waits for copies in progress."""
        while self._waiting:
            yield self._next()

    def _next(self) -> HostRows:
        step, keys, copy = self._waiting.popleft()
        return HostRows(step, keys, copy.wait())


class RowBatch:
    """Rows of several steps that are copied to the host together, as each copy costs the host as much as making rows.

    No row waits longer than a few steps, and those of a rare schedule are copied at once.
    """

    def __init__(self) -> None:
        self.parts: list[tuple[int, Sequence[Hashable]]] = []
        self._rows: list[Tensor] = []
        self._last_step = 0

    def add(self, step: int, keys: Sequence[Hashable], rows: Tensor) -> bool:
        """Add the rows of one step; return whether the batch should be copied now, before the next rows come."""
        self.parts.append((step, keys))
        self._rows.append(rows)
        next_step, self._last_step = 2 * step - self._last_step, step
        return len(self.parts) >= STEPS_TOGETHER or next_step - self.parts[0][0] >= STEPS_TOGETHER

    def take(self) -> tuple[list[tuple[int, Sequence[Hashable]]], Tensor]:
        """Return the step and keys of each part and all rows, and empty the batch."""
        parts, rows = self.parts, self._rows
        self.parts, self._rows = [], []
        return parts, torch.cat(rows) if len(rows) > 1 else rows[0]


# ---- rows of steps ---------------------------------------------------------------------------------------------------


class StepRows(NamedTuple):
    """The rows of one step on the host, one for each key."""

    step: int
    keys: list[Hashable]
    rows: Tensor


class StepCollector:
    """Collects tensors and returns the rows of each step once it is complete; only `drain` waits for the device.

    All tensors of a key in a step (a module that runs several times, several micro-batches) are merged into one row.
    Step 0 means that there are no steps: there, every tensor has its own row.

    Args:
        measure: Computes the rows.
    """

    def __init__(self, measure: Measure = summarize) -> None:
        self._measure = measure
        self._collectors: dict[torch.device, Collector] = {}
        self._queue = HostQueue()
        self._batch = RowBatch()  # of `add_rows`
        self._open: list[HostRows] = []  # of the step that may not be complete
        self._step = self._ended = self._collected = 0

    def add(self, key: Hashable, tensor: Tensor, step: int) -> None:
        """Collect one tensor of a step."""
        if step != self._step:
            self._start(step)
        collector = self._collectors.get(tensor.device)
        if collector is None:
            collector = self._collectors[tensor.device] = Collector(measure=self._measure)
        collector.add(key, tensor)
        self._collected += 1
        if self._collected >= MOST_COLLECTED:
            self.send()

    def add_rows(self, keys: Sequence[Hashable], rows: Tensor, step: int) -> None:
        """Add rows that were made elsewhere on the device; a row whose count is NaN stands for nothing.

        They are copied to the host together with those of the next steps, unless tensors are collected as well.
        """
        if step != self._step:
            self._start(step)
        if self._batch.add(step, keys, rows):
            self._send_batch()

    def send(self) -> None:
        """Read what was collected, before it is freed, and start the copy to the host."""
        self._collected = 0
        for collector in self._collectors.values():
            if len(collector):
                keys, rows = collector.finish()
                if keys:  # There are none if all tensors were overwritten.
                    self._send_batch()  # First, because steps arrive in order.
                    self._queue.send(self._step, [(self._step, keys)], rows)

    def end_step(self, step: int) -> None:
        """Send what was collected; nothing more comes for this step."""
        self.send()
        self._ended = step

    def ready(self) -> Iterator[StepRows]:
        """Yield the complete steps that have arrived, oldest first; never waits."""
        yield from self._complete(self._queue.ready())

    def drain(self) -> Iterator[StepRows]:
        """Yield the complete steps, oldest first; waits for copies in progress."""
        self.send()
        self._send_batch()
        yield from self._complete(self._queue.drain())

    def incomplete(self) -> StepRows | None:
        """Return what has arrived of the current step."""
        return _merge_step(self._open) if self._open else None

    def discard(self) -> None:
        """Forget what was collected and not yet read."""
        for collector in self._collectors.values():
            collector.discard()

    def _start(self, step: int) -> None:
        self.send()
        self._step = step
        if 0 < step <= self._ended:  # The run was rewound to an earlier step.
            self._ended = step - 1

    def _send_batch(self) -> None:
        if self._batch.parts:
            parts, rows = self._batch.take()
            self._queue.send(parts[0][0], parts, rows)

    def _complete(self, arrived: Iterable[HostRows]) -> Iterator[StepRows]:
        for part in _parts(arrived):
            if self._open and part.step != self._open[0].step:
                yield self._close()
            self._open.append(part)
        waiting = {step for step, _ in self._batch.parts}
        is_last = self._open and not len(self._queue) and self._open[0].step not in waiting
        if is_last and self._open[0].step <= self._ended:
            yield self._close()

    def _close(self) -> StepRows:
        parts, self._open = self._open, []
        return _merge_step(parts)


def _parts(arrived: Iterable[HostRows]) -> Iterator[HostRows]:
    """Yield the rows of each step, without those that stand for nothing."""
    for _, parts, rows in arrived:
        nothing = rows[:, COUNT].isnan()
        some_are_nothing, first = bool(nothing.any()), 0
        for step, keys in parts:
            own, first = slice(first, first + len(keys)), first + len(keys)
            if not some_are_nothing:
                yield HostRows(step, keys, rows[own])
            elif kept := (~nothing[own]).nonzero().flatten().tolist():
                yield HostRows(step, [keys[index] for index in kept], rows[own][kept])


def _merge_step(parts: Sequence[HostRows]) -> StepRows:
    """Merge the rows of equal keys, in the order in which keys first appear; without steps nothing is merged."""
    step, keys = parts[0].step, [key for part in parts for key in part.keys]
    rows = torch.cat([part.rows for part in parts]) if len(parts) > 1 else parts[0].rows
    if not step or len(set(keys)) == len(keys):
        return StepRows(step, keys, rows)
    position = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    calls: dict[Hashable, int] = {}
    nth: list[int] = []
    for key in keys:
        nth.append(calls.get(key, 0))
        calls[key] = nth[-1] + 1
    by_call = rows.new_zeros((max(nth) + 1, len(position), rows.shape[1]))
    by_call[nth, [position[key] for key in keys]] = rows
    return StepRows(step, list(position), merge_rows(by_call))
