"""The format of a run's directory: fields, limits, series of layers and how their numbers are packed, media.

It needs NumPy and not torch: `hookline.record` writes the format, and `hookline.runs` reads it.
"""

from __future__ import annotations

import binascii
import struct
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hookline.errors import RecordError

FORMAT = 1  # of a run's directory; a reader refuses a newer one
RESERVED = frozenset({"step", "epoch", "time"})  # fields of every row of metrics
NOT_METRICS = RESERVED | {"resumed"}  # a row with the latter marks where a run was resumed
NON_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
TEXT_FIELDS = frozenset({
    "time", "kind", "name", "hook", "event", "by", "reason", "message", "error", "text", "run_id",
})  # fmt: skip
FARTHEST_STEP = 1 << 53  # numbers beyond are not exact in every reader of JSON


def check_format(path: Path, run: Mapping[str, Any]) -> None:
    """Refuse a run whose directory has a newer format than this version of Hookline reads."""
    written = run.get("format", FORMAT)
    if not isinstance(written, int) or written > FORMAT:
        raise RecordError(f"{path} has the format {written!r}, and this Hookline reads {FORMAT}; upgrade Hookline")


def utc_now() -> str:
    """Return the time as ISO 8601 in UTC, to the millisecond, as run.json has it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


# ---- layers ----------------------------------------------------------------------------------------------------------

Floats = NDArray[np.float32]
HEADER_FIELDS = {"series", "name", "names", "columns"}
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


WINDOW_COLUMNS = {  # by series of histograms and their column: the statistic that says in which octave its bins end
    ("gradient_histograms", "count"): ("gradients", "top_octave"),
    ("activation_histograms", "counts"): ("activations", "histogram_top"),
    ("activation_histograms", "grad_counts"): ("activations", "grad_histogram_top"),
}


def read_header(record: dict[str, Any]) -> SeriesHeader | None:
    """Return the header that a line defines, None if it is not one of ours."""
    name, names, columns, bins = (record.get(key) for key in ("name", "names", "columns", "bins"))
    if not isinstance(name, str) or not isinstance(names, list) or not isinstance(columns, list):
        return None
    if not all(isinstance(one, str) for one in (*names, *columns)):
        return None
    if bins is not None and (type(bins) is not int or bins < 0):
        return None
    return SeriesHeader(name, tuple(names), tuple(columns), bins)


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


# ---- media -----------------------------------------------------------------------------------------------------------

LARGEST_SIDE = 4096  # pixels of an image
PNG = b"\x89PNG\r\n\x1a\n"  # how such a file begins


@dataclass(frozen=True)
class Table:
    """A table of plain values: texts, numbers, booleans and None."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    kind: str | None = None
    """What it shows, for viewers that draw it in another way. A table of the kind "confusion_matrix" has a row per
    target, named in its first column, and a column per prediction."""


@dataclass(frozen=True)
class Image:
    """An image as a PNG file."""

    png: bytes
    width: int
    height: int

    def __repr__(self) -> str:
        return f"Image({self.width} x {self.height}, {len(self.png):,} bytes)"


class MediaRow(NamedTuple):
    """A table or an image of one step."""

    step: int
    epoch: int
    time: float
    name: str
    content: Table | Image


def size_of_png(png: bytes) -> tuple[int, int] | None:
    """Return width and height of a PNG file, None if it is not one."""
    if len(png) < 33 or not png.startswith(PNG) or png[12:16] != b"IHDR":
        return None
    width, height = struct.unpack(">II", png[16:24])
    return width, height
