"""Collect statistics per layer without waiting for a device, and pack them as lines of layers.jsonl.

Names are written once, then packed numbers per step: GPT-2 small has 148 parameters, and ten named statistics of each
would be 90 kB of JSON a step; packed they are 8 kB.
"""

from __future__ import annotations

import binascii
import threading
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hookline import _device
from hookline._host_copy import HostCopy
from hookline.errors import RecordError
from hookline.record.json_lines import JsonLines

Floats = NDArray[np.float32]
_LOW_BITS, _MORE = 127, 128  # of a byte: seven bits of a count, and whether it has more of them


class SeriesHeader(NamedTuple):
    """What the values of a series mean: one row per name, one column per statistic, and bins for histograms."""

    series: str
    names: tuple[str, ...]
    columns: tuple[str, ...]
    bins: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one step's values."""
        return (len(self.names), len(self.columns), *(() if self.bins is None else (self.bins,)))


class LayerRow(NamedTuple):
    """One step of a series; the values are on the host, in float32, [names, columns] or [names, columns, bins]."""

    step: int
    header: SeriesHeader
    values: torch.Tensor

    @property
    def series(self) -> str:
        """The name of the series."""
        return self.header.series


class LayerBuffer:
    """A buffer of values per layer. Safe to use from several threads.

    The values are copied when they are added, so the caller may change them afterwards.

    Args:
        deliver: Receives batches of rows whose values are on the host, in the order in which they were added.
    """

    def __init__(self, deliver: Callable[[list[LayerRow]], None]) -> None:
        self._deliver = deliver
        self._waiting: deque[tuple[int, SeriesHeader, HostCopy]] = deque()
        self._headers: dict[str, SeriesHeader] = {}  # the newest of each series
        self._flushing = threading.RLock()

    def add(self, series: str, step: int, names: Sequence[str], columns: Sequence[str], values: torch.Tensor) -> None:
        """Add one step; on CUDA the copy to the host starts here, on the stream that computed the values.

        Args:
            series: The name of the series.
            step: The step of the values.
            names: The layers. Names and columns are written once, so keep their order from step to step.
            columns: The statistics.
            values: Real numbers, [names, columns] or [names, columns, bins].
        """
        shape, header = tuple(values.shape), self._headers.get(series)
        # Lists are not equal to the header's tuples; a caller who wants to save time passes the same tuples each step.
        if header is None or (header.names, header.columns, header.shape) != (names, columns, shape):
            header = SeriesHeader(series, tuple(names), tuple(columns), shape[2] if len(shape) == 3 else None)
            if shape != header.shape:
                expected = f"[{len(names)} names, {len(columns)} columns], or one more dimension for bins"
                raise RecordError(f"layers {series!r}: the values have the shape {list(shape)}; expected {expected}")
            self._headers[series] = header
        if values.is_complex() or values.is_meta:
            kind = "complex" if values.is_complex() else "on the meta device"
            raise RecordError(f"layers {series!r}: the values are {kind}; give real numbers that have a value")
        values = values.detach() if values.requires_grad else values
        # On an accelerator the copy to the host is the snapshot; elsewhere it would only refer to the values.
        snapshot = values.to(torch.float32, copy=not _device.is_accelerator(values.device))
        self._waiting.append((step, header, HostCopy(snapshot)))

    def flush(self) -> None:
        """Deliver what is on the host; waits for nothing."""
        self._deliver_rows(wait=False)

    def drain(self) -> None:
        """Deliver everything added so far, waiting for the devices."""
        self._deliver_rows(wait=True)

    def salvage(self) -> int:
        """Deliver what can still be read after a device failed, and return how many steps are lost."""
        lost = 0
        with self._flushing:
            while self._waiting:
                try:
                    self._deliver_rows(wait=True)
                except Exception:
                    self._waiting.popleft()
                    lost += 1
        return lost

    def _deliver_rows(self, wait: bool) -> None:
        rows = []
        with self._flushing:
            try:
                while self._waiting and (wait or self._waiting[0][2].is_ready()):
                    step, header, copy = self._waiting[0]
                    rows.append(LayerRow(step, header, copy.wait()))
                    self._waiting.popleft()
            finally:  # also when a device failed: what was read before is good
                if rows:
                    self._deliver(rows)


class LayerLines:
    """The file layers.jsonl, created with its first line.

    A line ``{"series", "name", "names", "columns"}`` defines an id, once per process, with ``"bins"`` for histograms.
    Each step is a line ``{"series", "step", "data"}`` with base64 of little-endian float32; histograms of counts have
    ``"counts"`` instead, a fifth as long (see `pack_counts`). A line ``{"resumed"}`` discards later steps above it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: JsonLines | None = None
        self._ids: dict[SeriesHeader, int] = {}

    def write(self, row: LayerRow) -> None:
        """Append one step, after its header if that is new. Raises `RecordError` if the disk refuses."""
        header = row.header
        number = self._ids.get(header)
        if number is None:
            number = len(self._ids)
            fields = {"series": number, "name": header.series, "names": header.names, "columns": header.columns}
            self._file().write(fields if header.bins is None else {**fields, "bins": header.bins})
            self._ids[header] = number  # only now: a header that the disk refused is written again
        name, text = pack(row.values.numpy(), binned=header.bins is not None)
        # Formatted by hand, because an encoder would scan every character of the numbers.
        self._file().write_line(b'{"series":%d,"step":%d,"%s":"%s"}' % (number, row.step, name.encode("ascii"), text))

    def resume_at(self, step: int) -> None:
        """Discard what was written about later steps; does nothing if there is no file."""
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


# ---- numbers as text -------------------------------------------------------------------------------------------------


def pack(values: Floats, binned: bool) -> tuple[str, bytes]:
    """Return the field and text for the values of one line: ``counts`` for bins of whole numbers, else ``data``."""
    counts = pack_counts(values.reshape(-1)) if binned else None
    if counts is not None:
        return "counts", b64encode(counts)
    return "data", b64encode(values.astype("<f4", copy=False).tobytes())


def unpack(record: dict[str, Any], size: int) -> Floats | None:
    """Return the values of a line, None if it is damaged or does not hold `size` of them."""
    try:
        if "counts" in record:
            return unpack_counts(b64decode(record["counts"], validate=True), size)
        floats = np.frombuffer(b64decode(record["data"], validate=True), dtype="<f4").astype(np.float32)
    except (KeyError, TypeError, binascii.Error, ValueError):
        return None
    return floats if floats.size == size else None


def pack_counts(values: Floats) -> bytes | None:
    """Pack whole numbers from 0 to 2^31, most of them 0 or small; None for other values.

    One bit per value tells whether it is above 0. For those that are, a byte has the lowest seven bits and whether
    there are more; for those with more, another byte has the next seven, and so on. It takes a few operations on all
    values together: 0.2 ms for 148 histograms of 512 bins.
    """
    filled = values != 0
    found = values[filled]
    with np.errstate(invalid="ignore"):  # NaN becomes some integer, which the comparison below finds
        rest = found.astype(np.int32)
    if not np.array_equal(rest.astype(np.float32), found) or (rest < 0).any():
        return None
    parts = [np.packbits(filled)]
    while rest.size:
        more = rest > _LOW_BITS
        parts.append((rest & _LOW_BITS).astype(np.uint8) | more * np.uint8(_MORE))
        rest = rest[more] >> 7
    return b"".join(part.tobytes() for part in parts)


def unpack_counts(packed: bytes, size: int) -> Floats | None:
    """Return what `pack_counts` packed, None if the bytes cannot be `size` values."""
    numbers = np.frombuffer(packed, dtype=np.uint8)
    begin = -(-size // 8)
    if numbers.size < begin:
        return None
    places = np.flatnonzero(np.unpackbits(numbers[:begin], count=size))
    values, shift = np.zeros(size, dtype=np.int64), 0
    while places.size:
        part = numbers[begin : begin + places.size]
        if part.size < places.size or shift > 28:
            return None
        values[places] |= (part & _LOW_BITS).astype(np.int64) << shift
        begin, shift, places = begin + places.size, shift + 7, places[part >= _MORE]
    return values.astype(np.float32) if begin == numbers.size else None
