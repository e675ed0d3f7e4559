"""Per-layer statistics on their way to layers.jsonl: the names once, then packed numbers per step.

GPT-2 small has 148 parameters; ten named statistics of each would be 90 kB of JSON a step, packed they are 8 kB.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from hookline.errors import RecordError
from hookline.record.packing import pack
from hookline.record.transfer import HostCopy
from hookline.record.writers import JsonLines


class Table(NamedTuple):
    """What the numbers of a series are about: one row a name, one column a statistic, of bins when there are any."""

    series: str
    names: tuple[str, ...]
    columns: tuple[str, ...]
    bins: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one step's values."""
        return (len(self.names), len(self.columns), *(() if self.bins is None else (self.bins,)))

    def fits(self, names: Sequence[str], columns: Sequence[str], values: torch.Tensor) -> bool:
        """Whether real values are about the same; of names in another form than a tuple that is not looked into."""
        same = self.names == names and self.columns == columns and self.shape == values.shape
        return same and not (values.is_complex() or values.is_meta)


class Layers(NamedTuple):
    """One step of a series, with its values on the host in float32."""

    step: int
    table: Table
    values: torch.Tensor


class LayerSink(Protocol):
    """Where finished steps go, in the order in which they were given."""

    def write(self, layers: Layers, /) -> None:
        """Take one step of one series."""


class LayerBuffer:
    """Takes tables of numbers without waiting for their device, and writes those that have arrived at each flush.

    The values are snapshotted, so the caller may change them afterwards. Safe to use from several threads.
    """

    def __init__(self, sink: LayerSink) -> None:
        self._sink = sink
        self._waiting: deque[tuple[int, Table, HostCopy]] = deque()
        self._tables: dict[str, Table] = {}  # the newest of each series
        self._flushing = threading.RLock()

    def add(self, series: str, step: int, names: Sequence[str], columns: Sequence[str], values: torch.Tensor) -> None:
        """Note one step; on CUDA the copy starts here, in the order of the stream that made the values.

        Names and columns are written once, so keep their order from step to step.
        """
        table = self._tables.get(series)
        if table is None or not table.fits(names, columns, values):
            table = self._tables[series] = _table(series, tuple(names), tuple(columns), values)
        self._waiting.append((step, table, HostCopy(_snapshot(values))))

    def flush(self) -> None:
        """Write what has arrived; waits for nothing."""
        with self._flushing:
            while self._waiting and self._waiting[0][2].has_arrived():
                self._write_oldest()

    def drain(self) -> None:
        """Write everything noted so far, waiting for the devices."""
        with self._flushing:
            while self._waiting:
                self._write_oldest()

    def salvage(self) -> int:
        """When a device has failed: write what can still be read and give up the rest; how many steps it is."""
        lost = 0
        with self._flushing:
            while self._waiting:
                try:
                    self._write_oldest()
                except Exception:
                    lost += 1
        return lost

    def _write_oldest(self) -> None:
        step, table, copy = self._waiting.popleft()
        self._sink.write(Layers(step, table, copy.tensor()))


class LayerLines:
    """The file layers.jsonl, made when the first step is written.

    A line ``{"series", "name", "names", "columns"}`` says what an id stands for, once in a process, with ``"bins"``
    where there are any. Each step is a line ``{"series", "step", "data"}``, its data base64 of little-endian float32;
    bins that hold counts have ``"counts"`` instead, a fifth as long (see `hookline.record.packing`). A line
    ``{"resumed"}`` takes back what stands above it of later steps.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: JsonLines | None = None
        self._ids: dict[Table, int] = {}

    def write(self, layers: Layers, /) -> None:
        """Append one step, after its header if that is new. Raises `RecordError` when the disk refuses."""
        known = self._ids.get(layers.table)
        if known is None:
            known = len(self._ids)
            self._file().write(_header(known, layers.table))
            self._ids[layers.table] = known  # only now: a header that the disk refused is tried again
        self._file().write_line(_line(known, layers))

    def go_back(self, step: int) -> None:
        """Say that what stands above of later steps is no more; where there is no file, nothing does."""
        if self._path.exists():
            self._file().write({"resumed": step})

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._lines is not None:
            self._lines.close()

    def _file(self) -> JsonLines:
        if self._lines is None:
            self._lines = JsonLines(self._path)
        return self._lines


def _table(series: str, names: tuple[str, ...], columns: tuple[str, ...], values: torch.Tensor) -> Table:
    """What the values are about; raises when they are not a table of these names and columns."""
    shape = tuple(values.shape)
    table = Table(series, names, columns, shape[2] if len(shape) == 3 else None)
    if shape != table.shape:
        expected = f"[{len(names)} names, {len(columns)} columns], or one more dimension for bins"
        raise RecordError(f"layers {series!r}: the values have the shape {list(shape)}; expected {expected}")
    if values.is_complex() or values.is_meta:
        kind = "complex" if values.is_complex() else "on the meta device"
        raise RecordError(f"layers {series!r}: the values are {kind}; give real numbers that have a value")
    return table


def _snapshot(values: torch.Tensor) -> torch.Tensor:
    """The values as they are now, in float32; on CUDA the copy to the host is the snapshot."""
    known = values.detach() if values.requires_grad else values
    return known.to(torch.float32, copy=not values.is_cuda)


def _header(series: int, table: Table) -> dict[str, Any]:
    header = {"series": series, "name": table.series, "names": list(table.names), "columns": list(table.columns)}
    return header if table.bins is None else {**header, "bins": table.bins}


def _line(series: int, layers: Layers) -> bytes:
    """One step as JSON, put together by hand: an encoder would look at every character of the numbers."""
    field, text = pack(layers.values.numpy(), binned=layers.table.bins is not None)
    return b'{"series":%d,"step":%d,"%s":"%s"}' % (series, layers.step, field.encode("ascii"), text)
