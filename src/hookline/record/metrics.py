"""Collect scalar metrics without waiting for a device, and turn them into rows for the sinks.

`MetricBuffer.log` is on the hot path; everything expensive happens in `flush`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hookline._host_copy import HostCopy
from hookline.errors import RecordError

RESERVED = frozenset({"step", "epoch", "time"})

Entry = tuple[int, int, str, Any, float]  # step, epoch, name, value, time
Row = dict[str, Any]


class MetricBuffer:
    """A buffer of scalars that makes one row per step and epoch. Safe to use from several threads.

    A tensor is copied on its own device when it is logged, so the caller may change it afterwards. What a flush finds
    on a CUDA device is delivered by a later flush, once the copy to the host is complete, or by `drain`, which waits.

    Args:
        deliver: Receives batches of rows, with numbers in place of tensors.
    """

    def __init__(self, deliver: Callable[[list[Row]], None]) -> None:
        self._deliver = deliver
        self._entries: list[Entry] = []
        self._in_flight: deque[_Batch] = deque()
        self._flushing = threading.RLock()

    def log(self, step: int, epoch: int, name: str, value: Any) -> None:
        """Add one value. A number costs 0.2 µs, a tensor one small copy on its device; neither waits for a device."""
        if type(value) is not float:
            value = _snapshot(name, value)
        if name in RESERVED:
            raise RecordError(f"no metric can be named {name!r}, a field of every row; try 'train/{name}'")
        self._entries.append((step, epoch, name, value, time.time()))

    def extend(self, entries: Iterable[Entry]) -> None:
        """Add many values; tensors must be 0-dim and are not copied, so they must not be written to any more."""
        self._entries.extend(entries)

    def flush(self) -> None:
        """Deliver what is on the host and start copying the rest, the scalars of a dtype together; never waits."""
        self._deliver_batches(wait=False)

    def drain(self) -> None:
        """Deliver everything logged so far, waiting for the devices."""
        self._deliver_batches(wait=True)

    def salvage(self) -> int:
        """Deliver only the numbers on the host, after a device failed, and return how many values are lost."""
        with self._flushing:
            batches = [batch.entries for batch in self._in_flight] + [self._take()]
            self._in_flight.clear()
            for entries in batches:
                self._deliver_entries([entry for entry in entries if not isinstance(entry[3], torch.Tensor)])
            return sum(isinstance(entry[3], torch.Tensor) for entries in batches for entry in entries)

    def _take(self) -> list[Entry]:
        """Remove and return the entries; one that another thread appends at the same time stays."""
        # Appending to a list is atomic, so `log` needs no lock; only the entries that were counted are removed.
        count = len(self._entries)
        taken = self._entries[:count]
        del self._entries[:count]
        return taken

    def _deliver_batches(self, wait: bool) -> None:
        with self._flushing:
            if entries := self._take():
                batch = _Batch(entries)
                self._in_flight.append(batch)  # before starting, so that `salvage` finds it if the device fails here
                batch.start()
            while self._in_flight and (wait or self._in_flight[0].is_ready()):
                entries = self._in_flight[0].wait()
                self._in_flight.popleft()
                self._deliver_entries(entries)

    def _deliver_entries(self, entries: list[Entry]) -> None:
        rows: dict[tuple[int, int], Row] = {}
        for step, epoch, name, value, logged_at in entries:
            row = rows.get((step, epoch))
            if row is None:
                row = rows[step, epoch] = {"step": step, "epoch": epoch, "time": round(logged_at, 6)}
            row[name] = value
        if rows:  # sorted, because some values are logged at once and losses only with the next flush
            self._deliver([row for _, row in sorted(rows.items())])


class _Batch:
    """The entries of one flush, with one copy to the host per device and dtype among their tensors."""

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries
        self._copies: list[tuple[list[int], HostCopy]] = []

    def start(self) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, (_, _, _, value, _) in enumerate(self.entries):
            if isinstance(value, torch.Tensor):
                groups.setdefault((value.device, value.dtype), []).append(index)
        for indices in groups.values():
            stacked = torch.stack([self.entries[index][3] for index in indices])
            self._copies.append((indices, HostCopy(stacked)))

    def is_ready(self) -> bool:
        return all(copy.is_ready() for _, copy in self._copies)

    def wait(self) -> list[Entry]:
        """Return the entries with numbers in place of tensors: integers as ints, booleans as bools."""
        for indices, copy in self._copies:
            values = copy.wait()
            if values.is_floating_point() and values.element_size() < 4:  # 8-bit floats have no `tolist`
                values = values.float()
            for index, number in zip(indices, values.tolist(), strict=True):
                step, epoch, name, _, logged_at = self.entries[index]
                self.entries[index] = (step, epoch, name, number, logged_at)
        return self.entries


def _snapshot(name: str, value: Any) -> Any:
    """Return plain numbers as they are and a tensor as a copy on its own device; raise for anything else."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise RecordError(f"metric {name!r} has shape {list(value.shape)}; log one number, e.g. its .mean()")
        if value.is_complex() or value.is_meta:
            kind = "complex" if value.is_complex() else "on the meta device"
            raise RecordError(f"metric {name!r} is {kind}; log a real number that has a value")
        copy = value.detach().clone()
        return copy if copy.dim() == 0 else copy.reshape(())
    if isinstance(value, (int, float)):
        return value
    if type(value).__module__ == "numpy" and getattr(value, "size", 0) == 1:
        return value.item()
    raise RecordError(f"metric {name!r} is a {type(value).__name__}; log a number or a tensor with one element")
