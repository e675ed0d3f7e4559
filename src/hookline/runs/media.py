"""Read the tables and images of a run; this needs no torch."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hookline._fs import refuse_link
from hookline.errors import RecordError
from hookline.record.format import MAX_IMAGE_SIDE, MEDIA_FILE, NON_FINITE, Image, MediaRow, Table, size_of_png
from hookline.record.json_lines import as_number, read_bytes, warn_at_caller
from hookline.runs.named import find_files

_FILE = re.compile(r"media/[A-Za-z0-9_][A-Za-z0-9_.-]*")
_PLAIN = (str, int, float, bool, type(None))


def read_media(run_dir: Path | str | None) -> list[MediaRow]:
    """Read the tables and images of a run in the order of their lines; empty if the run logged none.

    If several have one name and step, the last one counts. Those whose file is missing or damaged are left out with a
    `RuntimeWarning`, as are lines that are torn or damaged.
    """
    reader = find_files(run_dir)
    lines = reader.media_lines()
    reader.warn_of_damage()
    return [*read_newest_media(reader.path, lines)][::-1]


def read_newest_media(directory: Path, lines: Sequence[dict[str, Any]], most: int | None = None) -> Iterator[MediaRow]:
    """Yield the tables and images of a run, the newest first; each file is opened only when needed.

    Args:
        directory: The run's directory.
        lines: The lines of media.jsonl, the newest first.
        most: How many of each name to read; the files of the others are not opened.
    """
    counts: Counter[str] = Counter()
    unreadable = []
    for line in lines:
        counts[line["name"]] += 1
        if most is not None and counts[line["name"]] > most:
            continue
        content = _read_content(directory, line)
        if content is None:
            unreadable.append(str(line.get("file")))
        else:
            yield MediaRow(line["step"], line["epoch"], as_number(line["time"]) or 0.0, line["name"], content)
    if unreadable:
        more = f" ({len(unreadable) - 1} more like it)" if len(unreadable) > 1 else ""
        what = f"{unreadable[-1]} is missing or damaged{more}"
        warn_at_caller(f"{directory / MEDIA_FILE}: {what[:300]}; the others were read")


def _read_content(directory: Path, line: dict[str, Any]) -> Table | Image | None:
    """Return what a line's file contains; None if Hookline did not write the file."""
    file = line.get("file")
    if not isinstance(file, str) or not _FILE.fullmatch(file):  # a run from elsewhere may name any file
        return None
    try:
        refuse_link(directory / "media")
        data = read_bytes(directory / file)
        if line.get("type") == "image":
            size = size_of_png(data)
            return None if size is None or max(size) > MAX_IMAGE_SIDE else Image(data, *size)
        return _read_table(json.loads(data))
    except (RecordError, OSError, ValueError, RecursionError):
        return None


def _read_table(read: Any) -> Table | None:
    match read:
        case {"columns": list() as columns, "rows": list() as lines, "kind": str() | None as kind} if all(
            isinstance(line, list) and len(line) == len(columns) for line in lines
        ):
            rows = tuple(tuple(map(_read_cell, line)) for line in lines)
            is_plain = all(isinstance(cell, _PLAIN) for row in rows for cell in row)
            if is_plain and all(isinstance(title, str) for title in columns):
                return Table(tuple(columns), rows, kind)
    return None


def _read_cell(cell: Any) -> Any:
    return NON_FINITE.get(str(cell.get("float")), cell) if isinstance(cell, dict) else cell
