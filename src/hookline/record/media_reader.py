"""Read the tables and images of a run; this needs no torch."""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hookline._fs import refuse_link
from hookline.errors import RecordError
from hookline.record.json_lines import (
    NON_FINITE,
    as_number,
    directory_of,
    is_step,
    read_bytes,
    read_jsonl,
    warn_at_caller,
    warn_of_torn_line,
)

LARGEST_SIDE = 4096  # pixels of an image
PNG = b"\x89PNG\r\n\x1a\n"  # how such a file begins
_FILE = re.compile(r"media/[A-Za-z0-9_][A-Za-z0-9_.-]*")
_PLAIN = (str, int, float, bool, type(None))


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


def read_media(run_dir: Path | str | None) -> list[MediaRow]:
    """Read the tables and images of a run in the order of their lines; empty if the run logged none.

    Of several with one name and step, the last counts. Those whose file is missing or damaged are left out with a
    `RuntimeWarning`, as are lines torn by a kill.
    """
    return [*read_newest_media(run_dir)][::-1]


def read_newest_media(run_dir: Path | str | None, most: int | None = None) -> Iterator[MediaRow]:
    """Yield the tables and images of a run, the newest first; the file of each is opened when it is asked for.

    Args:
        run_dir: The run's directory.
        most: How many of each name to read; the files of the others are not opened.
    """
    directory = directory_of(run_dir)
    path = directory / "media.jsonl"
    if directory.is_dir() and not path.exists() and not path.is_symlink():
        return
    counts: Counter[str] = Counter()
    unreadable = []
    lines, is_torn = read_jsonl(path)
    if is_torn:
        warn_of_torn_line(path)
    for line in _newest_lines(lines):
        counts[line["name"]] += 1
        if most is not None and counts[line["name"]] > most:
            continue
        content = _read_content(directory, line)
        if content is None:
            unreadable.append(str(line.get("file")))
        else:
            epoch, time = line.get("epoch"), as_number(line.get("time")) or 0.0
            yield MediaRow(line["step"], epoch if type(epoch) is int else 0, time, line["name"], content)
    if unreadable:
        what = f"{unreadable[-1]} is missing or damaged" + (f", and {len(unreadable) - 1} more" * (len(unreadable) > 1))
        warn_at_caller(f"{path}: {what[:300]}; the others were read")


def count_media(run_dir: Path | str) -> int:
    """Return how many tables and images a run has logged, without opening them."""
    path = Path(run_dir) / "media.jsonl"
    return sum(1 for _ in _newest_lines(read_jsonl(path)[0])) if path.exists() else 0


def _newest_lines(lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the last line of each name and step, the newest first, without those that a resumed run has discarded."""
    seen: set[tuple[int, str]] = set()
    limit: int | None = None
    for line in reversed(lines):
        step, name, resumed_at = line.get("step"), line.get("name"), line.get("resumed")
        if type(resumed_at) is int:
            limit = resumed_at if limit is None else min(limit, resumed_at)
        elif type(step) is int and is_step(step) and isinstance(name, str):
            is_discarded = limit is not None and step > limit
            if not is_discarded and (step, name) not in seen:
                seen.add((step, name))
                yield line


def _read_content(directory: Path, line: dict[str, Any]) -> Table | Image | None:
    """Return what a line's file contains; None if it is not a file of ours."""
    file = line.get("file")
    if not isinstance(file, str) or not _FILE.fullmatch(file):  # a run from elsewhere may name any file
        return None
    try:
        refuse_link(directory / "media")
        data = read_bytes(directory / file)
        if line.get("type") == "image":
            size = size_of_png(data)
            return None if size is None or max(size) > LARGEST_SIDE else Image(data, *size)
        return _read_table(json.loads(data))
    except (RecordError, OSError, ValueError, RecursionError):
        return None


def _read_table(read: Any) -> Table | None:
    if (
        not isinstance(read, dict)
        or not isinstance(read.get("columns"), list)
        or not isinstance(read.get("rows"), list)
    ):
        return None
    columns, kind = tuple(read["columns"]), read.get("kind")
    rows = tuple(tuple(map(_read_cell, row)) for row in read["rows"] if isinstance(row, list))
    is_plain = all(len(row) == len(columns) and all(isinstance(one, _PLAIN) for one in row) for row in rows)
    if not is_plain or len(rows) != len(read["rows"]) or not all(isinstance(title, str) for title in columns):
        return None
    return Table(columns, rows, kind if isinstance(kind, str) else None)


def _read_cell(cell: Any) -> Any:
    return NON_FINITE.get(str(cell.get("float")), cell) if isinstance(cell, dict) else cell


def size_of_png(png: bytes) -> tuple[int, int] | None:
    """Return width and height of a PNG file, None if it is not one."""
    if len(png) < 33 or not png.startswith(PNG) or png[12:16] != b"IHDR":
        return None
    width, height = struct.unpack(">II", png[16:24])
    return width, height
