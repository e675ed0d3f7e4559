"""The format of a run's directory: fields, limits, series of layers and how their numbers are packed, media.

It needs NumPy and not torch: `hookline.record` writes the format, and `hookline.runs` reads it.
"""

from __future__ import annotations

import math
import struct
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hookline._bins import FEWEST_BINS
from hookline._limits import MAX_LAYER_VALUES
from hookline.errors import RecordError

RUN_FILE, CONFIG_FILE = "run.json", "config.yaml"
METRICS_FILE, LAYERS_FILE = "metrics.jsonl", "layers.jsonl"
EVENTS_FILE, MEDIA_FILE = "events.jsonl", "media.jsonl"
FORMAT = 1  # The format of a run's directory; a reader rejects a newer one.
RESERVED = frozenset({"step", "epoch", "time"})  # fields of every row of metrics
NOT_METRICS = RESERVED | {"resumed"}  # a row with the latter marks where a run was resumed
NON_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
TEXT_FIELDS = frozenset({
    "time", "kind", "name", "hook", "event", "by", "reason", "message", "error", "text", "run_id",
})  # fmt: skip
MAX_STEP = 1 << 53  # larger numbers are not exact in every reader of JSON
_TEXT_OR_NONE = (str, type(None))
# The fields of run.json: types, the fields of a mapping, or what each item of a list is; those with "?" may be missing.
_RUN_FIELDS = {
    "run_id?": str,
    "started?": str,
    "git?": {},
    "environment?": {"argv?": [str], "gpus?": [str]},
    "hooks?": [{"name": str, "parameters?": {}}],
    "lineage?": (dict, type(None)),
    "attempts?": [{"started": str, "ranks?": {}}],
    "outcome?": _TEXT_OR_NONE,
    "reason?": _TEXT_OR_NONE,
    "costs?": [{"hook": str, "seconds": (int, float)}],
    "counters?": {"step?": int, "epoch?": int},
    "lost?": int,
    "optimizers?": [str],
    "verdict?": {"health": str, "reason": str},
}


def check_run(path: Path, run: Mapping[str, Any]) -> None:
    """Refuse a run.json with a newer format, and one with a field of a type that Hookline does not write.

    Args:
        path: The run's directory.
        run: The contents of run.json; some fields are written when a run ends.
    """
    written = run.get("format", FORMAT)
    if not isinstance(written, int) or written > FORMAT:
        raise RecordError(f"{path} has the format {written!r}, but this Hookline reads {FORMAT}; upgrade Hookline")
    if (field := _misfit(run, _RUN_FIELDS, "")) is not None:
        raise RecordError(f"{path / RUN_FILE} is damaged: Hookline did not write its field {field}")


def _misfit(value: Any, expected: Any, name: str) -> str | None:
    """Return the name of the first field whose type is not the expected one; None if all fit."""
    if isinstance(expected, dict) and isinstance(value, dict):
        inside = ((key, key.rstrip("?"), inner) for key, inner in expected.items())
        fields = [
            (value.get(field), inner, f"{name}.{field}".lstrip("."))
            for key, field, inner in inside
            if field == key or field in value
        ]
    elif isinstance(expected, list) and isinstance(value, list):
        fields = [(item, expected[0], f"{name}[{index}]") for index, item in enumerate(value)]
    else:
        return None if not isinstance(expected, (dict, list)) and isinstance(value, expected) else name
    return next((misfit for field in fields if (misfit := _misfit(*field)) is not None), None)


def utc_now() -> str:
    """Return the time as ISO 8601 in UTC, to the millisecond, as run.json has it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


# ---- layers ----------------------------------------------------------------------------------------------------------

Floats = NDArray[np.float32]
HEADER_FIELDS = {"series", "name", "names", "columns"}
_LOW_BITS, _MORE = 127, 128  # Parts of a byte: seven bits of a count, and whether more bits follow.


class SeriesHeader(NamedTuple):
    """The meaning of a series' values: one row per name, one column per statistic, and bins for histograms."""

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


DAMAGED = (KeyError, TypeError, ValueError, OverflowError)
"""What `read_header` and `unpack` raise for a line that is damaged."""


def read_header(record: dict[str, Any]) -> SeriesHeader:
    """Return the header that a line defines."""
    name, names, columns, bins = record["name"], record["names"], record["columns"], record.get("bins")
    is_plain = isinstance(names, list) and isinstance(columns, list) and (bins is None or type(bins) is int)
    if not is_plain or not all(isinstance(text, str) for text in (name, *names, *columns)) or (bins or 0) < 0:
        raise ValueError("not a header")
    header = SeriesHeader(name, tuple(names), tuple(columns), bins)
    is_of_monitor = any((name, column) in WINDOW_COLUMNS for column in columns)
    if bins is not None and is_of_monitor and (bins < FEWEST_BINS or bins % 2):  # as many of each sign
        raise ValueError("not the bins of a monitor")
    if math.prod(header.shape) > MAX_LAYER_VALUES:  # a histogram's line has a bit for an empty bin
        raise ValueError("too large")
    return header


def unpack(record: dict[str, Any], shape: tuple[int, ...]) -> Floats:
    """Return the values of a line in the shape of its header."""
    size = math.prod(shape)
    if "counts" in record:
        values = unpack_counts(b64decode(record["counts"], validate=True), size)
    else:
        values = np.frombuffer(b64decode(record["data"], validate=True), dtype="<f4").astype(np.float32)
    if values.size != size:  # `reshape` would accept any number of values for some shapes
        raise ValueError(f"{values.size} values instead of {size}")
    return values.reshape(shape)


def pack_counts(values: Floats) -> bytes | None:
    """Pack whole numbers from 0 to 2^31, most of them 0 or small; None for other values.

    One bit per value says whether it is above 0. For those that are, a byte has the lowest seven bits and whether
    there are more; for those with more, another byte has the next seven, and so on. It takes a few operations on all
    values together: 0.2 ms for 148 histograms of 512 bins.
    """
    filled = values != 0
    counts = values[filled]
    with np.errstate(invalid="ignore"):  # NaN becomes some integer, which the comparison below detects
        rest = counts.astype(np.int32)
    if not np.array_equal(rest.astype(np.float32), counts) or (rest < 0).any():
        return None
    parts = [np.packbits(filled)]
    while rest.size:
        more = rest > _LOW_BITS
        parts.append((rest & _LOW_BITS).astype(np.uint8) | more * np.uint8(_MORE))
        rest = rest[more] >> 7
    return b"".join(part.tobytes() for part in parts)


def unpack_counts(packed: bytes, size: int) -> Floats:
    """Return what `pack_counts` packed. Raises `ValueError` if the bytes cannot be `size` values."""
    numbers = np.frombuffer(packed, dtype=np.uint8)
    begin = -(-size // 8)
    if numbers.size < begin:
        raise ValueError("too short")
    places = np.flatnonzero(np.unpackbits(numbers[:begin], count=size))
    values, shift = np.zeros(size, dtype=np.int64), 0
    while places.size:
        part = numbers[begin : begin + places.size]
        if part.size < places.size or shift > 28:
            raise ValueError("too short, or a count beyond 2^31")
        values[places] |= (part & _LOW_BITS).astype(np.int64) << shift
        begin, shift, places = begin + places.size, shift + 7, places[part >= _MORE]
    if begin != numbers.size:
        raise ValueError("too long")
    return values.astype(np.float32)


# ---- media -----------------------------------------------------------------------------------------------------------

MAX_IMAGE_SIDE = 4096  # pixels of an image
PNG = b"\x89PNG\r\n\x1a\n"  # how such a file begins


@dataclass(frozen=True)
class Table:
    """A table of plain values: strings, numbers, booleans and None."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    kind: str | None = None
    """What it shows, for viewers that draw it differently. A table of the kind "confusion_matrix" has a row per
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
    """Return width and height of a PNG file; None if it is not one."""
    if len(png) < 33 or not png.startswith(PNG) or png[12:16] != b"IHDR":
        return None
    width, height = struct.unpack(">II", png[16:24])
    return width, height
