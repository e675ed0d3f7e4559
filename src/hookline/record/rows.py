"""Read the rows of a run's files in batches, without those that a resumed run has discarded; this needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hookline.record.json_lines import as_number, is_step, parse_lines, read_lines, read_records
from hookline.record.packing import HEADER_FIELDS, Floats, SeriesHeader, read_header, unpack


def read_rows(path: Path, incomplete: list[str], until: int | None = None) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of metrics.jsonl or layers.jsonl in batches, without those that a resumed run has discarded.

    Args:
        path: The file.
        incomplete: Receives the file's name if a line in it is incomplete.
        until: The last step to yield rows of.

    Raises:
        RecordError: If the file cannot be read.
    """
    attempts = list(_attempts(read_lines(path, path.parent)))
    for attempt, limit in zip(attempts, _last_steps(attempts, until), strict=True):
        lines = [line for line in attempt[0].split(b"\n") if line]
        count = 0
        for batch in parse_lines(lines):
            count += len(batch)
            yield batch if limit is None else [row for row in batch if not _is_after(row.get("step"), limit)]
        if count < len(lines) and path.name not in incomplete:
            incomplete.append(path.name)


def columns_of_rows(rows: Sequence[dict[str, Any]]) -> dict[str, tuple[list[int], list[Any]]]:
    """Return the steps and the values of each field in the order of the rows; rows without a step are not ours."""
    names = tuple(rows[0]) if rows else ()
    if set(map(len, rows)) == {len(names)}:
        try:
            columns = {name: [row[name] for row in rows] for name in names}
        except KeyError:
            pass
        else:  # all rows have the same fields, as most do
            steps = columns.get("step", [])
            if set(map(type, steps)) == {int}:
                return {name: (steps, values) for name, values in columns.items()}
    found: dict[str, tuple[list[int], list[Any]]] = {}
    for row in rows:
        step = row.get("step")
        if type(step) is int:
            for name, value in row.items():
                if name not in found:
                    found[name] = [], []
                own_steps, own_values = found[name]
                own_steps.append(step)
                own_values.append(value)
    return found


def read_layer_rows(
    path: Path, incomplete: list[str], until: int | None = None
) -> Iterator[tuple[int, SeriesHeader, Floats]]:
    """Yield the steps of layers.jsonl: the step, what its values mean, and the values in the shape of the header.

    Args:
        path: The file.
        incomplete: Receives the file's name if a line in it is incomplete.
        until: The last step to yield rows of.

    Raises:
        RecordError: If the file cannot be read.
    """
    headers: dict[int, SeriesHeader | None] = {}  # a resumed run defines its ids again
    for rows in read_rows(path, incomplete, until):
        for row in rows:
            series = row.get("series")
            if type(series) is not int:  # not a line of ours
                continue
            if row.keys() >= HEADER_FIELDS:
                headers[series] = read_header(row)
            elif is_step(row.get("step")) and (header := headers.get(series)) is not None:
                values = unpack(row, math.prod(header.shape))
                if values is not None:  # otherwise the line is damaged
                    yield row["step"], header, values.reshape(header.shape)


def read_event_rows(directory: Path, incomplete: list[str]) -> list[dict[str, Any]]:
    """Return the events of all ranks in the order of their times; those of one rank other than 0 have its `rank`.

    Args:
        directory: The run's directory.
        incomplete: Receives the names of the files with a line that is incomplete.

    Raises:
        RecordError: If a file cannot be read.
    """
    events = []
    for path in (directory / "events.jsonl", *sorted((directory / "ranks").glob("*/events.jsonl"))):
        rows, is_incomplete = read_records(path, directory)
        events += rows
        incomplete += [path.relative_to(directory).as_posix()] * is_incomplete
    return sorted(events, key=lambda event: as_number(event.get("time")) or 0.0)


def _attempts(content: bytes) -> Iterator[tuple[bytes, int | None]]:
    """Split a file where the run was resumed; yield each part and the step that it begins after, None for the first."""
    begin, resumed_at, found = 0, None, content.find(b'"resumed":')
    while found >= 0:
        line_begin, line_end = content.rfind(b"\n", 0, found) + 1, content.find(b"\n", found)
        line_end = len(content) if line_end < 0 else line_end
        for marker in [one for batch in parse_lines([content[line_begin:line_end]]) for one in batch]:
            step = marker.get("step", marker.get("resumed"))
            if "resumed" in marker and type(step) is int:
                yield content[begin:line_begin], resumed_at
                begin, resumed_at = line_begin, step
        found = content.find(b'"resumed":', line_end)
    yield content[begin:], resumed_at


def _last_steps(attempts: Sequence[tuple[bytes, int | None]], until: int | None) -> list[int | None]:
    """Return the last step that counts of each attempt: the first one that a later attempt began after."""
    limits, limit = [], until
    for _, resumed_at in reversed(attempts):
        limits.append(limit)
        limit = min((one for one in (limit, resumed_at) if one is not None), default=None)
    return limits[::-1]


def _is_after(step: Any, limit: int) -> bool:
    return type(step) is int and step > limit
