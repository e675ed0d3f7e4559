"""Metrics on their way to the record: logged without waiting for a device, brought over together, in order.

`MetricBuffer.log` is on the hot path; everything that costs happens in `flush`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from hookline.errors import RecordError
from hookline.record.transfer import Transfer

RESERVED = frozenset({"step", "epoch", "time"})

Entry = tuple[int, int, str, Any, float]  # step, epoch, name, value, time


class Sink(Protocol):
    """Where finished lines go: one call per (step, epoch)."""

    def write(self, record: Mapping[str, Any], /) -> None:
        """Take one record."""


class MetricBuffer:
    """Collects scalars and writes one record per (step, epoch).

    A tensor is snapshotted where it lies, so the caller may change it afterwards. What a flush finds on a
    CUDA device is written by a later flush, once it has arrived, or by `drain`, which waits. Safe to use from
    several threads.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._entries: list[Entry] = []
        self._in_flight: deque[_Batch] = deque()
        self._flushing = threading.RLock()

    def log(self, step: int, epoch: int, name: str, value: Any) -> None:
        """Note one value. A number costs 0.2 µs, a tensor one small copy on its own device; never a sync."""
        if type(value) is not float:
            value = _snapshot(name, value)
        if name in RESERVED:
            raise RecordError(f"no metric can be named {name!r}, a field of every record; try 'train/{name}'")
        self._entries.append((step, epoch, name, value, time.time()))

    def extend(self, entries: Iterable[Entry]) -> None:
        """Note many at once; tensors must be 0-dim, and nobody may write to them any more: they are not copied."""
        self._entries.extend(entries)

    def flush(self) -> None:
        """Write what has arrived and send the rest on its way, one copy per device; waits for nothing."""
        with self._flushing:
            self._collect()
            while self._in_flight and self._in_flight[0].has_arrived():
                self._write_oldest()

    def drain(self) -> None:
        """Write everything logged so far, waiting for the devices."""
        with self._flushing:
            self._collect()
            while self._in_flight:
                self._write_oldest()

    def salvage(self) -> int:
        """When a device has failed: write the numbers on the host and give up the rest; how many it is."""
        with self._flushing:
            batches = [batch.entries for batch in self._in_flight] + [self._take()]
            self._in_flight.clear()
            for entries in batches:
                self._write([entry for entry in entries if not isinstance(entry[3], torch.Tensor)])
            return sum(isinstance(entry[3], torch.Tensor) for entries in batches for entry in entries)

    def _take(self) -> list[Entry]:
        """Cut off what is there now; another thread may be appending at this moment, and its entry stays."""
        count = len(self._entries)
        taken = self._entries[:count]
        del self._entries[:count]
        return taken

    def _collect(self) -> None:
        entries = self._take()
        if entries:
            batch = _Batch(entries)
            self._in_flight.append(batch)  # before sending: if the device fails here, salvage still finds it
            batch.send()

    def _write_oldest(self) -> None:
        entries = self._in_flight[0].values()
        self._in_flight.popleft()
        self._write(entries)

    def _write(self, entries: list[Entry]) -> None:
        lines: dict[tuple[int, int], dict[str, Any]] = {}
        for step, epoch, name, value, logged_at in entries:
            line = lines.get((step, epoch))
            if line is None:
                line = lines[step, epoch] = {"step": step, "epoch": epoch, "time": round(logged_at, 6)}
            line[name] = value
        for _, line in sorted(lines.items()):  # some values are logged at once, losses with the next flush
            self._sink.write(line)


class _Batch:
    """The entries of one flush, with the transfers that bring their tensors over."""

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries
        self._transfers: list[tuple[list[int], Transfer]] = []

    def send(self) -> None:
        """Start one copy per device."""
        tensors: dict[torch.device, list[int]] = {}
        for index, entry in enumerate(self.entries):
            if isinstance(entry[3], torch.Tensor):
                tensors.setdefault(entry[3].device, []).append(index)
        for indices in tensors.values():
            self._transfers.append((indices, Transfer([self.entries[index][3] for index in indices])))

    def has_arrived(self) -> bool:
        """Whether `values` would not wait."""
        return all(transfer.has_arrived() for _, transfer in self._transfers)

    def values(self) -> list[Entry]:
        """The entries with numbers in the tensors' places; waits for what is still on its way."""
        entries = self.entries
        for indices, transfer in self._transfers:
            for index, number in zip(indices, transfer.numbers(), strict=True):
                step, epoch, name, _, logged_at = entries[index]
                entries[index] = (step, epoch, name, number, logged_at)
        return entries


def _snapshot(name: str, value: Any) -> Any:
    """The value as it is now: plain numbers as they are, a tensor as a copy on its own device."""
    if isinstance(value, torch.Tensor):
        _check_tensor(name, value)
        copy = value.detach().clone()
        return copy if copy.dim() == 0 else copy.reshape(())
    if isinstance(value, (int, float)):
        return value
    if type(value).__module__ == "numpy" and getattr(value, "size", 0) == 1:
        return value.item()
    kind = type(value).__name__
    raise RecordError(f"metric {name!r} is a {kind}; log a number or a tensor with one element")


def _check_tensor(name: str, value: torch.Tensor) -> None:
    if value.numel() != 1:
        shape = list(value.shape)
        raise RecordError(f"metric {name!r} has shape {shape}; log one number, e.g. its .mean()")
    if value.is_complex() or value.is_meta:
        kind = "complex" if value.is_complex() else "on the meta device"
        raise RecordError(f"metric {name!r} is {kind}; log a real number that has a value")
