"""Collect tensors while a model runs, measure them together, and bring one row per key and step to the host later."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline._bins import BINS
from hookline._device import HostCopy
from hookline._tensors import inside_transform, tensor_version
from hookline.core.shared_part import SharedPart, Sizes
from hookline.stats import borrowed
from hookline.stats.histograms import has_range, merge_rows, move_ranges, tops_of
from hookline.stats.rows import ABSMAX, COUNT, L2, MAX, MEAN, MIN, STATISTICS, STD, join_rows, split_rows, summarize

MOST_COLLECTED = 4096  # tensors; small ones cost more in bookkeeping than in memory
_SCALED = (MEAN, STD, MIN, MAX, ABSMAX, L2)
_PEAKS, _SUMS = 2, 8  # the numbers into which `split_rows` splits a row

Measure = Callable[[Sequence[Tensor], Sequence[object]], Tensor]
"""Takes tensors on one device and their names, and returns one row for each."""


class StepRows(NamedTuple):
    """The rows of one step, one for each key."""

    step: int
    keys: Sequence[Any]
    rows: Tensor


class SentRows(NamedTuple):
    """The rows of one step that were sent to the host and may still be on their way; the keys are already known."""

    step: int
    parts: list[tuple[Sequence[Any], HostCopy]]
    """The keys of some rows, and the copy of these."""

    @property
    def keys(self) -> list[Any]:
        """Each key once, in the order in which they first appear."""
        return list(dict.fromkeys(key for keys, _ in self.parts for key in keys))

    def read(self) -> StepRows:
        """Wait for the rows, and return one for each key, in the order in which keys first appear.

        Rows that stand for nothing are left out. Those of equal keys are merged; without steps nothing is merged.
        """
        keys: list[Any] = []
        parts: list[Tensor] = []
        for sent_keys, copy in self.parts:
            part = copy.wait()
            is_filled = ~part[:, COUNT].isnan()
            if not is_filled.all():  # Otherwise nothing is copied out of the pinned memory.
                sent_keys = [sent_keys[index] for index in is_filled.nonzero().flatten().tolist()]
                part = part[is_filled]
            keys += sent_keys
            parts.append(part)
        rows = torch.cat(parts) if len(parts) > 1 else parts[0]
        if not self.step or len(set(keys)) == len(keys):
            return StepRows(self.step, keys, rows)
        calls: Counter[Hashable] = Counter()
        nth: list[int] = []
        for key in keys:
            nth.append(calls[key])
            calls[key] += 1
        position = {key: index for index, key in enumerate(calls)}
        by_call = rows.new_zeros((max(nth) + 1, len(position), rows.shape[1]))
        by_call[nth, [position[key] for key in keys]] = rows
        return StepRows(self.step, list(position), merge_rows(by_call))

    def share(
        self,
        kind: str,
        epoch: int,
        *,
        with_histograms: bool,
        is_copy: Callable[[Any], bool],
        scale: float,
        use: Callable[[StepRows], Mapping[str, float]],
    ) -> SharedPart:
        """Return the statistics rows of a step on this rank, as the record's exchange takes them.

        Each key has the numbers into which `split_rows` splits its row, and whether it has a row. Histograms are moved
        to the highest range of all ranks before they are added up.

        Args:
            kind: The kind of the rows; the same on all ranks.
            epoch: The epoch of the step.
            with_histograms: Whether rows carry a histogram after their statistics.
            is_copy: Returns whether a key's tensor on this rank is a copy of one that counts on another rank.
            scale: The number that multiplies the merged rows' values.
            use: Called with the merged rows, on all ranks; returns metrics to record at their step.
        """
        width = (_PEAKS + 1, _SUMS + 1 + BINS) if with_histograms else (_PEAKS, _SUMS + 1)
        widths = dict.fromkeys(map(str, self.keys), width)
        names = list(widths)
        copies = {str(key) for key in self.keys if is_copy(key)}

        @cache
        def read() -> tuple[Tensor, Tensor]:
            """Wait for the rows; return one for each name, and 1 where it exists: the others count for nothing."""
            step_rows = self.read()
            keys = list(map(str, step_rows.keys))
            if keys == names and not copies:  # nearly always
                return step_rows.rows.double(), torch.ones(len(names), dtype=torch.float64)
            rows = torch.zeros(len(names), step_rows.rows.shape[1], dtype=torch.float64)
            present = torch.zeros(len(names), dtype=torch.float64)
            counted = [index for index, key in enumerate(keys) if key not in copies]
            places = [names.index(keys[index]) for index in counted]
            rows[places], present[places] = step_rows.rows[counted].double(), 1.0
            return rows, present

        def maxima() -> Tensor:
            """Return the extremes of each row, and the octave in which its histogram ends."""
            rows, _ = read()
            _, peaks = split_rows(rows[:, : len(STATISTICS)])
            if with_histograms:
                ranged = has_range(rows[:, len(STATISTICS) : -1])
                peaks = torch.cat([peaks, torch.where(ranged, rows[:, -1], float("-inf")).unsqueeze(1)], dim=1)
            return peaks.reshape(-1)

        def sums(maxima: Tensor) -> Tensor:
            """Return the sums of each row, whether it exists, and its histogram."""
            rows, present = read()
            parts = [split_rows(rows[:, : len(STATISTICS)])[0], present.unsqueeze(1)]
            if with_histograms:
                counts, tops = rows[:, len(STATISTICS) : -1], rows[:, -1]
                parts.append(move_ranges(counts, tops, maxima.reshape(-1, _PEAKS + 1)[:, -1]))
            return torch.cat(parts, dim=1).reshape(-1)

        def finish(sizes: Sizes, maxima: Tensor, sums: Tensor) -> Mapping[str, float]:
            """Make the rows of all ranks, and use them."""
            peaks, totals = maxima.reshape(-1, width[0]), sums.reshape(-1, width[1])
            rows = join_rows(totals[:, :_SUMS], peaks[:, :_PEAKS])
            rows[:, _SCALED] *= scale
            if with_histograms:
                shift = math.log2(scale)
                scaled, usual = peaks[:, -1] + shift, tops_of(rows).to(peaks.dtype)
                # A single process would have chosen the usual range, which is higher if there are only zeros, or
                # infinities.
                top = torch.where(scaled.isneginf() | ((usual > scaled) & shift.is_integer()), usual, scaled)
                counts = move_ranges(totals[:, _SUMS + 1 :], scaled, top)
                rows = torch.cat([rows, counts, top.unsqueeze(1)], dim=1)
            present = totals[:, _SUMS] > 0
            known = [name for name, has_row in zip(sizes, present.tolist(), strict=True) if has_row]
            return use(StepRows(self.step, known, rows[present]))

        return SharedPart(kind, self.step, epoch, widths, finish, maxima, sums)


class HostQueue(deque[tuple[int, Sequence[Any], HostCopy]]):
    """A queue of rows that are copied to the host in the background; they arrive in the order they were sent."""

    def send(self, step: int, keys: Sequence[Any], rows: Tensor) -> None:
        """Start the copy of the rows of one step; nothing waits."""
        self.append((step, keys, HostCopy(rows)))

    def ready(self, wait: bool = False) -> Iterator[StepRows]:
        """Yield what has arrived, oldest first; with `wait`, everything that was sent."""
        while self and (wait or self[0][2].is_ready()):
            step, keys, copy = self.popleft()
            yield StepRows(step, keys, copy.wait())

    def take(self) -> list[tuple[int, Sequence[Any], HostCopy]]:
        """Remove and return everything that was sent, with its copies in progress; nothing waits."""
        sent = list(self)
        self.clear()
        return sent


class StepCollector:
    """Collects tensors and returns the rows of each step once it is complete; only `drain` waits for the device.

    Tensors are measured together: at `send`, or when they begin to cost memory. A launch per tensor would cost more on
    the host than reading the tensor costs on the device. In training the backward pass keeps most outputs alive anyway;
    those that only the collector keeps, as in evaluation, may take `limit_bytes`.

    If a tensor is written to between `add` and the launch, the intended values are lost. Its version shows
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
        self._measured: list[tuple[Sequence[Hashable], Tensor]] = []  # keys and rows of this step, on their devices
        self._sent: list[SentRows] = []
        self._open: SentRows | None = None  # the step that was not complete when this was last asked
        self._step = self._ended = 0
        self._forget_tensors()

    def _forget_tensors(self) -> None:
        self._collected: list[tuple[Hashable, Tensor, int]] = []  # with their versions
        self._unshared: list[Tensor] = []  # Tensors that the backward pass is not known to keep.
        self._bytes = 0  # The bytes of the unshared tensors.

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
        if len(self._collected) + len(self._measured) >= MOST_COLLECTED:
            self.send()
        elif key in self._overwritten:
            self._read()
        elif self._bytes > self.limit_bytes:
            # Tensors that the backward pass keeps stay alive while the model runs, so they need not be checked again.
            self._unshared = list(filter(is_sole_owner, self._unshared))
            self._bytes = sum(unshared.nbytes for unshared in self._unshared)
            # Half of the limit; otherwise each of the next few tensors would be checked.
            if self._bytes > self.limit_bytes // 2:
                self._read()

    def add_rows(self, keys: Sequence[Hashable], rows: Tensor, step: int) -> None:
        """Add rows that were computed elsewhere on the device; a row whose count is NaN stands for nothing."""
        if step != self._step:
            self._start(step)
        self._measured.append((keys, rows))
        if not step:  # No step will end.
            self.send()

    def _start(self, step: int) -> None:
        self.send()
        self._step = step
        if 0 < step <= self._ended:  # The run went back to an earlier step.
            self._ended = step - 1

    def _read(self) -> None:
        """Launch the measurement of the collected tensors, and drop the references to them."""
        if inside_transform() is not None:
            return  # Tensors cannot be read inside `torch.func`; they are read when it is done.
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
            self._measured.append((keys, self._measure(tensors, keys)))

    def send(self) -> None:
        """Read what was collected, before it is freed, and start the copies to the host, one for each device."""
        self._read()
        measured, self._measured = self._measured, []
        if measured and (not self._sent or self._sent[-1].step != self._step):
            self._sent.append(SentRows(self._step, []))
        for _, adjacent in groupby(measured, key=lambda part: part[1].device):
            keys, rows = zip(*adjacent, strict=True)
            copy = HostCopy(torch.cat(rows) if len(rows) > 1 else rows[0])
            self._sent[-1].parts.append((list(chain(*keys)), copy))

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
        self._open = None
        # A step is complete when rows of the next one have arrived, or when it has ended.
        while self._sent and (wait or all(copy.is_ready() for sent in self._sent[:2] for _, copy in sent.parts)):
            oldest = self._sent[0]
            if len(self._sent) == 1 and oldest.step > self._ended:
                self._open = oldest
                return
            del self._sent[0]
            rows = oldest.read()
            if rows.keys:
                yield rows

    def drain(self) -> Iterator[StepRows]:
        """Yield the complete steps, oldest first; waits for copies in progress."""
        self.send()
        yield from self.ready(wait=True)

    def take(self) -> list[SentRows]:
        """Remove and return all steps so far as complete ones, oldest first, without waiting for their rows."""
        self.send()
        sent, self._sent, self._open = self._sent, [], None
        return sent

    def incomplete(self) -> StepRows | None:
        """Return the rows of the current step that had arrived when complete steps were last requested."""
        rows = self._open.read() if self._open else None
        return rows if rows and rows.keys else None


def is_sole_owner(tensor: Tensor) -> bool:
    """Return whether the backward pass keeps neither a tensor nor its memory; True if torch cannot tell.

    Without gradients, another use that exists at the moment, such as a view, says nothing about what comes later.
    """
    if not tensor.requires_grad:
        return True
    try:
        uses: int = tensor._use_count()  # type: ignore[attr-defined]
        return uses == 1 and torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= 2
    except AttributeError:
        return True
