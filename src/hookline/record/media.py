"""Tables and images of a run: check and encode what hooks log, write media.jsonl and the files in media/."""

from __future__ import annotations

import hashlib
import io
import re
import struct
import zlib
from collections.abc import Iterable
from itertools import islice
from time import time
from typing import Any

import torch
from torch import Tensor

from hookline._console import logger
from hookline._device import HostCopy
from hookline._fs import make_directory, refuse_link, write_atomic
from hookline.errors import RecordError, with_article
from hookline.record import strict_json
from hookline.record.format import MAX_IMAGE_SIDE, PNG, Image, MediaRow, Table, size_of_png
from hookline.record.json_lines import JsonLines, writing
from hookline.record.pending import Pending
from hookline.record.redaction import redact_name, redact_text

MAX_CELLS = 10_000  # Limit of a table: people look at it, and it is copied while training waits.
MAX_CELL_LENGTH = 1000  # characters of a string in a table, for the same reason

_COLOUR_TYPES = {1: 0, 3: 2, 4: 6}  # Color types of PNG by the number of channels: gray, RGB, RGB with alpha.
_SLACK = 1e-3  # interpolation overshoots 0..1 slightly, which is not worth a warning
# A name that a file can have unchanged. Other names get a part of their hash, so no two names share a file. Upper case
# gets one, too, because some file systems ignore case.
_FILE_NAME = re.compile(r"(?!.*-[0-9a-f]{8}$)[a-z0-9](?:[a-z0-9_.-]{0,78}[a-z0-9])?")


def pending_media(step: int, epoch: int, name: str, content: Table | Image | Pixels) -> Pending:
    """Return the row of a table, or of an image that may be on its way to the host."""
    logged_at = round(time(), 6)

    def read() -> list[MediaRow]:
        encoded = content.encode(name) if isinstance(content, Pixels) else content
        return [MediaRow(step, epoch, logged_at, name, encoded)]

    return Pending("media", [content.copy] if isinstance(content, Pixels) else [], read)


# ---- tables ----------------------------------------------------------------------------------------------------------


def media_name(name: Any) -> str:
    """Return the name of a table or an image without secrets. Raises `RecordError` if it is not a string."""
    if not isinstance(name, str) or not name:
        raise RecordError(f"a table or an image needs a name, got {strict_json.short_repr(name)}")
    return str(strict_json.simplify(redact_name(str.__str__(name))))


def make_table(name: str, columns: Iterable[str], rows: Iterable[Iterable[Any]], kind: str | None = None) -> Table:
    """Check a table and copy it as plain values, without secrets.

    Args:
        name: Its name, for messages.
        columns: The titles of its columns.
        rows: As many cells per row as there are columns: strings, numbers, booleans, None, and tensors or NumPy arrays
            with one element. A two-dimensional tensor or array is read with one wait for its device.
        kind: The kind of table, as in `Table.kind`.

    Raises:
        RecordError: If a row or a cell does not fit, or there are more than `MAX_CELLS`.
    """
    if isinstance(columns, str) or not isinstance(columns, Iterable):
        raise RecordError(f"table {name!r}: columns must be a list of strings, got {strict_json.short_repr(columns)}")
    titles = tuple(_plain_cell(str(title)) for title in islice(columns, MAX_CELLS + 1))
    if not titles:
        raise RecordError(f"table {name!r} has no columns")
    plain: Any = rows.tolist() if hasattr(rows, "tolist") else rows  # a tensor, an array: one copy to the host
    if isinstance(plain, (str, bytes)) or not isinstance(plain, Iterable):
        raise RecordError(f"table {name!r}: rows must be a list of rows, got {strict_json.short_repr(plain)}")
    most = MAX_CELLS // len(titles)
    checked: list[tuple[Any, ...]] = []
    for row in islice(plain, most + 1):
        where = f"table {name!r}, row {len(checked)}"
        if isinstance(row, (str, bytes)) or not isinstance(row, Iterable):
            raise RecordError(f"{where}: expected a list of {len(titles)} cells, got {strict_json.short_repr(row)}")
        cells = tuple(islice(row, len(titles) + 1))
        if len(cells) != len(titles):
            count = f"more than {len(titles)}" if len(cells) > len(titles) else len(cells)
            raise RecordError(f"{where} has {count} cells; there are {len(titles)} columns: {', '.join(titles)[:200]}")
        try:
            checked.append(tuple(map(_plain_cell, cells)))
        except TypeError as error:
            raise RecordError(f"{where}: {error}; a cell is a string, a number, a bool or None") from error
    if len(checked) > most:
        raise RecordError(
            f"table {name!r} has more than {MAX_CELLS:,} cells ({most:,} rows of {len(titles):,} columns); "
            "log only a part of it"
        )
    return Table(titles, tuple(checked), None if kind is None else str(kind))


def _plain_cell(value: Any) -> Any:
    """Return a cell as a plain value; a string longer than `MAX_CELL_LENGTH` characters is cut and ends with a note.

    Raises:
        TypeError: If the value cannot be a cell.
    """
    if isinstance(value, Tensor) or type(value).__module__ == "numpy":
        if getattr(value, "is_meta", False) or (value.numel() if isinstance(value, Tensor) else value.size) != 1:
            raise TypeError(f"a cell has the shape {list(value.shape)}")
        value = value.item()
    if isinstance(value, str):
        text = redact_text(value)
        text = text if len(text) <= MAX_CELL_LENGTH else f"{text[:MAX_CELL_LENGTH]}… ({len(text):,} characters)"
        return strict_json.simplify(text)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return strict_json.simplify(int(value))
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"a cell is {with_article(type(value).__name__)}")


# ---- images ----------------------------------------------------------------------------------------------------------


class Pixels:
    """The pixels of an image on their way to the host; the copy starts here, and the tensor may change afterwards.

    Args:
        name: The image's name, for messages.
        image: [H, W], [C, H, W] or [H, W, C] with 1, 3 or 4 channels: uint8, bool, or floats from 0 to 1.

    Raises:
        RecordError: If it is not an image or is too large.
    """

    def __init__(self, name: str, image: Tensor) -> None:
        image = image.detach()
        if image.is_meta or image.is_complex() or image.layout != torch.strided:
            raise RecordError(f"image {name!r} has no pixels that can be read; pass a dense tensor of real numbers")
        if image.dim() == 3 and image.shape[0] in _COLOUR_TYPES:
            image = image.permute(1, 2, 0)
        elif image.dim() == 2:
            image = image.unsqueeze(2)
        if image.dim() != 3 or image.shape[2] not in _COLOUR_TYPES or 0 in image.shape:
            expected = "[H, W], [C, H, W] or [H, W, C] with 1, 3 or 4 channels"
            raise RecordError(f"image {name!r} has the shape {list(image.shape)}; expected {expected}")
        _check_size(name, image.shape[1], image.shape[0])
        is_outside = torch.zeros((), dtype=torch.uint8, device=image.device)
        if image.is_floating_point():
            image = image.float()
            is_outside = (~((image >= -_SLACK) & (image <= 1 + _SLACK)).all()).to(torch.uint8)
            image = image.nan_to_num(0).clamp(0, 1).mul(255).round().to(torch.uint8)
        elif image.dtype == torch.bool:
            image = image.to(torch.uint8) * 255
        elif image.dtype != torch.uint8:
            kind = str(image.dtype).removeprefix("torch.")
            raise RecordError(f"image {name!r} is {kind}; pass uint8, or floats from 0 to 1")
        self._height, self._width, self._channels = image.shape
        # Whether a value was outside of the range travels with the pixels, so that nothing waits for the device.
        self.copy = HostCopy(torch.cat([image.reshape(-1), is_outside.reshape(1)]))

    def encode(self, name: str) -> Image:
        """Wait for the copy and return the image; values that were not from 0 to 1 cause a warning."""
        pixels = self.copy.wait()
        if pixels[-1]:
            logger.warning("image %r has values that are not from 0 to 1; they were clipped", name)
        lines = pixels[:-1].reshape(self._height, -1)
        filters = torch.zeros(self._height, 1, dtype=torch.uint8)  # each line begins with the number of its filter
        data = zlib.compress(torch.cat([filters, lines], dim=1).numpy().tobytes(), 6)
        header = struct.pack(">IIBBBBB", self._width, self._height, 8, _COLOUR_TYPES[self._channels], 0, 0, 0)
        png = PNG + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")
        return Image(png, self._width, self._height)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def make_image(name: str, image: Any) -> Image | Pixels:
    """Return an image as PNG, or its pixels on their way to the host.

    Args:
        name: Its name, for messages.
        image: A tensor or NumPy array as `Pixels` takes it, a PIL image, or a matplotlib figure.

    Raises:
        RecordError: If it is none of these, or too large.
    """
    if isinstance(image, Tensor):
        return Pixels(name, image)
    package = type(image).__module__.partition(".")[0]
    try:
        if package == "numpy":
            return Pixels(name, torch.as_tensor(image.copy()))  # a copy has no negative strides and may be kept
        buffer = io.BytesIO()
        if hasattr(image, "getbands"):  # An image of PIL, which need not be imported.
            _check_size(name, *image.size)
            image.save(buffer, format="PNG")
        elif callable(getattr(image, "savefig", None)):
            image.savefig(buffer, format="png")
        else:
            kinds = "a tensor, a NumPy array, a PIL image or a matplotlib figure"
            raise RecordError(f"image {name!r} is {with_article(type(image).__name__)}; log {kinds}")
    except RecordError:
        raise
    except Exception as error:  # Raised by an array of objects, a mode that PNG lacks, or a broken figure.
        raise RecordError(f"image {name!r} cannot be written as PNG ({type(error).__name__}: {error})") from error
    png = buffer.getvalue()
    size = size_of_png(png)
    if size is None:
        raise RecordError(f"image {name!r}: its own writer did not make a PNG")
    _check_size(name, *size)
    return Image(png, *size)


def _check_size(name: str, width: int, height: int) -> None:
    if width > MAX_IMAGE_SIDE or height > MAX_IMAGE_SIDE:
        most = f"at most {MAX_IMAGE_SIDE} x {MAX_IMAGE_SIDE}"
        raise RecordError(f"image {name!r} is {width} x {height} pixels, but {most} can be logged; make it smaller")


# ---- files -----------------------------------------------------------------------------------------------------------


class MediaLines(JsonLines):
    """The file media.jsonl: a line per table and image, each of which has its file in media/.

    A line is ``{"step", "epoch", "time", "name", "type", "file"}``, and comes after its file, so that it never names an
    incomplete one. A line ``{"resumed"}`` discards later steps above it.
    """

    def write_row(self, row: MediaRow) -> None:
        """Write the file of a row, then its line. Raises `RecordError` if the disk refuses."""
        content = row.content
        kind, suffix, data = (
            ("table", "json", _table_bytes(content)) if isinstance(content, Table) else ("image", "png", content.png)
        )
        path = self.path.parent / "media" / f"{_safe(row.name)}-{row.step}.{suffix}"
        with writing(path):
            refuse_link(path.parent)
            make_directory(path.parent)
            write_atomic(path, data)
        where = {"step": row.step, "epoch": row.epoch, "time": row.time, "name": row.name}
        self.write({**where, "type": kind, "file": f"media/{path.name}"})


def _safe(name: str) -> str:
    """Return the part of a file name for a table's or an image's name; different names get different ones."""
    if _FILE_NAME.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode("utf-8", "backslashreplace")).hexdigest()[:8]
    return f"{re.sub('[^a-z0-9]+', '_', name[:200].lower()).strip('_')[:60] or 'media'}-{digest}"


def _table_bytes(table: Table) -> bytes:
    """Return a table as strict JSON. A number that JSON lacks is ``{"float": "NaN"}``: a string may be "NaN", too."""
    rows = [
        [{"float": cell} if isinstance(cell, float) and cell - cell != 0 else cell for cell in row]
        for row in table.rows
    ]
    return strict_json.dumps({"columns": table.columns, "rows": rows, "kind": table.kind}).encode("ascii")
