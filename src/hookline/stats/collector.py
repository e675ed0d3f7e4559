"""Collect tensors while a model runs, measure them together, and bring one row per key and step to the host later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline._host_copy import HostCopy
from hookline._tensors import inside_transform, tensor_version
from hookline.stats import borrowed
from hookline.stats.columns import COUNT
from hookline.stats.histograms import merge_rows
from hookline.stats.rows import summarize

MOST_COLLECTED = 4096  # tensors; small ones cost more in bookkeeping than in memory
STEPS_TOGETHER = 8  # steps whose rows are copied to the host together; without steps, as many batches of rows

Measure = Callable[[Sequence[Tensor], Sequence[object]], Tensor]
"""Takes tensors on one device and their names, and returns one row for each."""


class StepRows(NamedTuple):
    """The rows of one step, one for each key."""

    step: int
    keys: Sequence[Any]
    rows: Tensor


class SentRows(NamedTuple):
    """The rows of one step that were sent to the host and may still be on their way; the keys are known."""

    step: int
    parts: list[tuple[Sequence[Any], HostCopy, int]]
    """The keys of some rows, the copy that they are in, and where they begin in it."""

    @property
    def keys(self) -> list[Any]:
        """Each key once, in the order in which they first appear."""
        return list(dict.fromkeys(key for keys, _, _ in self.parts for key in keys))

    def read(self) -> StepRows:
        """Wait for the rows, and return one for each key; those that stand for nothing are left out."""
        arrived = (
            StepRows(self.step, [(self.step, keys)], copy.wait()[begin : begin + len(keys)])
            for keys, copy, begin in self.parts
        )
        found = list(_split_by_step(arrived))
        return _merge_step(found) if found else StepRows(self.step, [], torch.zeros(0))


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

    def ready(self, wait: bool = False) -> Iterator[StepRows]:
        """Yield what has arrived, oldest first; with `wait`, everything that was sent."""
        while self._waiting and (wait or self._waiting[0][2].is_ready()):
            step, keys, copy = self._waiting.popleft()
            yield StepRows(step, keys, copy.wait())

    def take(self) -> list[tuple[int, Sequence[Any], HostCopy]]:
        """Take out everything that was sent, with the copies as they are; nothing waits."""
        taken = list(self._waiting)
        self._waiting.clear()
        return taken


class StepCollector:
    """Collects tensors and returns the rows of each step once it is complete; only `drain` waits for the device.

    Tensors are measured together: at `send`, or when they begin to cost memory. A launch per tensor would cost more on
    the host than reading the tensor costs on the device. In training the backward pass keeps most outputs alive anyway;
    those that only the collector keeps, as in evaluation, may take `limit_bytes`.

    A tensor that is written to between `add` and the launch has lost the values that were meant. Its version shows
    that: it gets no row, and from then on tensors of its key are read as soon as they are added. Inference tensors and
    writes through `.data` have no version.

    All tensors of a key in a step (a module that runs several times, several micro-batches) are merged into one row.
    Step 0 means that there are no steps: there, every tensor has its own row.

    Args:
        measure: Computes the rows.
    """

    limit_bytes = 256 * 1024 * 1024
    """The memory that tensors may take which nothing else keeps alive."""

    def __init__(self, measure: Measure = summarize) -> None:
        self._measure = measure
        self._overwritten: set[Hashable] = set()  # keys
        self._measured: list[StepRows] = []  # rows of tensors of this step, on their devices
        self._added: list[StepRows] = []  # rows of `add_rows`
        self._queue = HostQueue()
        self._open: list[StepRows] = []  # of the step that may not be complete
        self._step = self._ended = 0
        self._last_added = 0  # the step of the newest rows of `add_rows`
        self._count = 0  # tensors that were added since the last `send`
        self._forget_tensors()

    def _forget_tensors(self) -> None:
        self._collected: list[tuple[Hashable, Tensor, int]] = []  # with their versions
        self._unshared: list[Tensor] = []  # those that were not yet seen to be kept by the backward pass
        self._bytes = 0  # of these

    def add(self, key: Hashable, tensor: Tensor, step: int) -> None:
        """Collect one tensor of a step."""
        if step != self._step:
            self._start(step)
        if borrowed.threads and borrowed.is_borrowed():
            # It will be overwritten, but a launch for each would cost the host more than a copy costs the device.
            tensor = tensor.clone()
        self._collected.append((key, tensor, tensor_version(tensor)))
        self._unshared.append(tensor)
        self._bytes += tensor.nbytes
        self._count += 1
        if self._count >= MOST_COLLECTED:
            self.send()
        elif key in self._overwritten:
            self._read()
        elif self._bytes > self.limit_bytes:
            # What the backward pass keeps stays alive while the model runs, so it need not be checked again.
            self._unshared = list(filter(is_sole_owner, self._unshared))
            self._bytes = sum(unshared.nbytes for unshared in self._unshared)
            # Half of the limit, or the next few tensors would be checked each.
            if self._bytes > self.limit_bytes // 2:
                self._read()

    def add_rows(self, keys: Sequence[Hashable], rows: Tensor, step: int) -> None:
        """Add rows that were made elsewhere on the device; a row whose count is NaN stands for nothing.

        They are copied to the host together with those of the next steps, because each copy costs the host as much as
        making the rows: with those of `STEPS_TOGETHER` steps at most, or together with rows of tensors.
        """
        if step != self._step:
            self._start(step)
        self._added.append(StepRows(step, keys, rows))
        next_step, self._last_added = 2 * step - self._last_added, step
        if len(self._added) >= STEPS_TOGETHER or next_step - self._added[0].step >= STEPS_TOGETHER:
            self._copy_to_host()

    def _start(self, step: int) -> None:
        self.send()
        self._step = step
        if 0 < step <= self._ended:  # The run was rewound to an earlier step.
            self._ended = step - 1

    def _read(self) -> None:
        """Launch the measurement of the collected tensors, and drop the references to them."""
        if inside_transform() is not None:
            return  # What is computed in here cannot be read; the tensors are read when `torch.func` is done.
        collected = self._collected
        self._forget_tensors()  # First, so that a tensor that cannot be measured does not affect the next pass.
        by_device: dict[torch.device, list[tuple[Hashable, Tensor]]] = {}
        for key, tensor, version in collected:
            if tensor_version(tensor) == version:
                by_device.setdefault(tensor.device, []).append((key, tensor))
            else:
                self._overwritten.add(key)
        for pairs in by_device.values():
            keys, tensors = zip(*pairs, strict=True)
            self._measured.append(StepRows(self._step, keys, self._measure(tensors, keys)))

    def send(self) -> None:
        """Read what was collected, before it is freed, and start the copy to the host."""
        self._read()
        self._count = 0
        if self._measured:
            self._copy_to_host()

    def _copy_to_host(self) -> None:
        """Start the copies, one for all adjacent rows that are on one device."""
        # Added rows are first, because steps must arrive in order and measured ones are of the newest step.
        parts, self._added, self._measured = self._added + self._measured, [], []
        for _, adjacent in groupby(parts, key=lambda part: part.rows.device):
            some = list(adjacent)
            rows = torch.cat([part.rows for part in some]) if len(some) > 1 else some[0].rows
            self._queue.send(some[0].step, [(part.step, part.keys) for part in some], rows)

    def end_step(self, step: int) -> None:
        """Send what was collected; nothing more comes for this step."""
        self.send()
        self._ended = step

    def discard(self) -> None:
        """Forget what was collected and not yet sent, as after a forward pass that failed."""
        self._forget_tensors()
        self._measured = []

    def ready(self, wait: bool = False) -> Iterator[StepRows]:
        """Yield the complete steps that have arrived, oldest first; with `wait`, all complete ones that were sent."""
        for part in _split_by_step(self._queue.ready(wait)):
            if self._open and part.step != self._open[0].step:
                yield self._close()
            self._open.append(part)
        # Added rows of the same step may still wait for those of the next ones.
        waiting = {part.step for part in self._added}
        if self._open and self._open[0].step <= self._ended and not self._queue and self._open[0].step not in waiting:
            yield self._close()

    def _close(self) -> StepRows:
        parts, self._open = self._open, []
        return _merge_step(parts)

    def drain(self) -> Iterator[StepRows]:
        """Yield the complete steps, oldest first; waits for copies in progress."""
        self.send()
        self._copy_to_host()  # added rows that wait for more
        yield from self.ready(wait=True)

    def take(self) -> list[SentRows]:
        """Take out all steps so far as complete ones, oldest first, without waiting for their rows."""
        self.send()
        self._copy_to_host()
        steps: dict[int, SentRows] = {}
        opened, self._open = self._open, []
        for part in opened:
            steps.setdefault(part.step, SentRows(part.step, [])).parts.append((part.keys, HostCopy(part.rows), 0))
        for _, parts, copy in self._queue.take():
            begin = 0
            for step, keys in parts:
                steps.setdefault(step, SentRows(step, [])).parts.append((keys, copy, begin))
                begin += len(keys)
        return list(steps.values())

    def incomplete(self) -> StepRows | None:
        """Return what has arrived of the current step."""
        return _merge_step(self._open) if self._open else None


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


def _split_by_step(arrived: Iterable[StepRows]) -> Iterator[StepRows]:
    """Yield the rows of each step, without those that stand for nothing."""
    for _, parts, rows in arrived:
        kept = ~rows[:, COUNT].isnan()
        if len(parts) == 1 and kept.all():  # nearly always
            step, keys = parts[0]
            yield StepRows(step, keys, rows)
            continue
        sizes = [len(keys) for _, keys in parts]
        for (step, keys), own, own_kept in zip(parts, torch.split(rows, sizes), torch.split(kept, sizes), strict=True):
            if own_kept.all():
                yield StepRows(step, keys, own)
            elif own_kept.any():
                yield StepRows(step, [keys[index] for index in own_kept.nonzero().flatten().tolist()], own[own_kept])


def _merge_step(parts: Sequence[StepRows]) -> StepRows:
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
