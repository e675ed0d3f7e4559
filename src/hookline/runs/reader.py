"""`RunReader`: reads the files of a run, each of them once, without the rows that a resumed run has discarded.

A run that resumes repeats the steps after its checkpoint, so rows of an earlier attempt count up to the step at which a
later one began. Files are read in blocks. It needs no torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from hookline._fs import open_plain
from hookline.errors import RecordError
from hookline.record.format import (
    HEADER_FIELDS,
    NON_FINITE,
    RESERVED,
    Floats,
    SeriesHeader,
    check_format,
    read_header,
    unpack,
)
from hookline.record.json_lines import (
    as_number,
    directory_of,
    is_step,
    parse_json,
    parse_lines,
    read_bytes,
    read_records,
    warn_of_torn_line,
)
from hookline.record.labels import Labels, read_labels
from hookline.record.lock import has_owner
from hookline.runs.config import read_config

RUN, CONFIG = "run.json", "config.yaml"
METRICS, LAYERS, EVENTS, MEDIA = "metrics.jsonl", "layers.jsonl", "events.jsonl", "media.jsonl"
FARTHEST_BACK = 4 << 20  # bytes from the end of a file that `last_lines` reads
_LARGEST = 64 << 20  # bytes of a run.json
TAIL = 64 << 10  # bytes: hundreds of rows of metrics
_BLOCK = 8 << 20  # bytes that are parsed together
_MARK = b'"resumed":'


class RunReader:
    """Reads the files of a run's directory, also while they are written or after the writer was killed.

    Nothing is read before it is asked for. What is small is kept; rows are read in blocks and given away.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.incomplete: list[str] = []
        """The files in which a line is not whole, as after a kill; of those that were read."""
        self._ends: dict[str, bytes] = {}  # the last bytes of files that were read whole

    @cached_property
    def run(self) -> dict[str, Any]:
        """The fields of run.json. Raises `RecordError` if the directory is not a run, or has a newer format."""
        try:
            with _open(self.path / RUN) as file:
                run = parse_json(file.read(_LARGEST))
        except (OSError, ValueError) as error:
            missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
            why = f"has no {RUN}" if missing else f"its {RUN} cannot be read or is damaged"
            raise RecordError(f"{self.path} is not a run: {why}; a run's directory is runs/<run_id>") from error
        if not isinstance(run, dict) or not isinstance(run.get("run_id"), str):
            raise RecordError(f"{self.path} is not a run: its {RUN} was not written by Hookline")
        check_format(self.path, run)
        return run

    @cached_property
    def labels(self) -> Labels:
        """Name, tags and notes; empty ones if labels.json is damaged."""
        try:
            return read_labels(self.path)
        except RecordError:
            return Labels()

    @cached_property
    def config_bytes(self) -> bytes:
        """The text of config.yaml. Raises `RecordError` if it cannot be read."""
        return read_bytes(self.path / CONFIG)

    @cached_property
    def config(self) -> Any:
        """What config.yaml contains. Raises `RecordError` if it cannot be read."""
        return read_config(self.config_bytes, self.path / CONFIG)

    @cached_property
    def has_owner(self) -> bool:
        """Whether a process is writing the run."""
        return has_owner(self.path)

    # ---- rows --------------------------------------------------------------------------------------------------------

    def metrics(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows of metrics.jsonl in batches."""
        return self._rows(METRICS)

    def layers(self) -> Iterator[tuple[int, SeriesHeader, Floats]]:
        """Yield the steps of layers.jsonl: the step, what its values mean, and the values in the shape of the header.

        A run that recorded no layers has no such file.
        """
        if self._is_missing(LAYERS):
            return
        headers: dict[int, SeriesHeader | None] = {}  # a resumed run defines its ids again
        for rows in self._rows(LAYERS):
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

    def events(self) -> list[dict[str, Any]]:
        """Return the events of all ranks in the order of their times; those of one rank other than 0 have its `rank`.

        Raises:
            RecordError: If a file cannot be read.
        """
        events = []
        for path in (self.path / EVENTS, *sorted((self.path / "ranks").glob(f"*/{EVENTS}"))):
            rows, is_incomplete = read_records(path, self.path)
            events += rows
            self.incomplete += [path.relative_to(self.path).as_posix()] * is_incomplete
        return sorted(events, key=lambda event: as_number(event.get("time")) or 0.0)

    def media_lines(self) -> list[dict[str, Any]]:
        """Return the lines of media.jsonl, the newest first; of several with one name and step, the last.

        A run that recorded neither tables nor images has no such file.
        """
        rows = [] if self._is_missing(MEDIA) else [row for batch in self._rows(MEDIA) for row in batch]
        newest: dict[tuple[int, str], dict[str, Any]] = {}
        for row in reversed(rows):
            step, name = row.get("step"), row.get("name")
            if type(step) is int and is_step(step) and isinstance(name, str):
                newest.setdefault((step, name), row)
        return list(newest.values())

    def _is_missing(self, name: str) -> bool:
        """Return whether a run has no file of this name; a directory that is no run has none, and is an error."""
        return not os.path.lexists(self.path / name) and os.path.isdir(self.path)  # noqa: PTH112 - never raises

    def warn_of_torn_lines(self) -> None:
        """Warn of files that were read and have a line which is not whole."""
        for name in self.incomplete:
            warn_of_torn_line(self.path / name)

    def _rows(self, name: str) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows of a file in batches, without those that a resumed run has discarded."""
        path = self.path / name
        try:
            file = _open(path)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            reason = getattr(error, "strerror", None) or str(error)
            raise RecordError(f"cannot read {path}: {reason}. A run's directory is runs/<run_id>") from error
        with file:
            end = self._whole_end(file)
            file.seek(max(end - FARTHEST_BACK, 0))
            self._ends[name] = file.read(end - file.tell())
            marks = [(0, None), *_resume_marks(file, end)]
            limits = _last_steps([step for _, step in marks])
            for (begin, _), (stop, _), limit in zip(marks, [*marks[1:], (end, None)], limits, strict=True):
                for block in _blocks(file, begin, stop):
                    lines = [line for line in block.split(b"\n") if line]
                    count = 0
                    for batch in parse_lines(lines):
                        count += len(batch)
                        yield batch if limit is None else [row for row in batch if not _is_after(row, limit)]
                    if count < len(lines) and name not in self.incomplete:
                        self.incomplete.append(name)

    def _whole_end(self, file: BinaryIO) -> int:
        """Return where a file ends, without a last line that the process which owns the run is still writing."""
        end = file.seek(0, os.SEEK_END)
        if not end:
            return 0
        file.seek(end - 1)
        if file.read(1) == b"\n" or not self.has_owner:
            return end
        while end:
            begin = max(end - TAIL, 0)
            file.seek(begin)
            if (newline := file.read(end - begin).rfind(b"\n")) >= 0:
                return begin + newline + 1
            end = begin
        return 0

    # ---- the ends of files -------------------------------------------------------------------------------------------

    def last_rows(self, name: str, containing: bytes = b"", most: float = math.inf) -> Iterator[dict[str, Any]]:
        """Yield the last whole rows of a file that count, the newest first.

        Args:
            name: The file.
            containing: Only rows are returned whose lines have these bytes.
            most: How many bytes of lines to read, unless the last line is longer.
        """
        size, last_step, has_row = 0, math.inf, False
        for line in self.last_lines(name):
            size += len(line) + 1
            if size > most and has_row:
                return
            if containing in line or _MARK in line:
                with suppress(ValueError, RecursionError):
                    row = json.loads(line)
                    step = row.get("step", row.get("resumed")) if isinstance(row, dict) else None
                    if type(step) is int and "resumed" in row:
                        last_step = min(last_step, step)
                    elif isinstance(row, dict) and not (type(step) is int and step > last_step):
                        has_row = True
                        yield row

    def read_end(self, name: str) -> None:
        """Read the last 4 MB of a file, so that `last_lines` need not open it again each time."""
        if name in self._ends:
            return
        with suppress(OSError), _open(self.path / name) as file:
            file.seek(max(file.seek(0, os.SEEK_END) - FARTHEST_BACK, 0))
            self._ends[name] = file.read(FARTHEST_BACK)

    def last_lines(self, name: str) -> Iterator[bytes]:
        """Yield the last lines of a file, the newest first; more is read when it is asked for, up to 4 MB."""
        if name in self._ends:
            end = self._ends[name]
            lines = end.split(b"\n")
            yield from reversed(lines[len(end) == FARTHEST_BACK :])  # the first one may begin before
            return
        with suppress(OSError), _open(self.path / name) as file:
            size = begin = file.seek(0, os.SEEK_END)
            first = b""  # the line that begins before what was read
            while begin > 0 and size - begin < FARTHEST_BACK:
                block = min(begin, max(TAIL, size - begin))  # as much as before, so that long lines are not slow
                begin -= block
                file.seek(begin)
                first, *lines = (file.read(block) + first).split(b"\n")
                yield from reversed(lines)
            if begin == 0:
                yield first


def _open(path: Path) -> BinaryIO:
    return open(open_plain(path, os.O_RDONLY), "rb")  # noqa: PTH123 - a descriptor, not a path


def _blocks(file: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
    """Yield a part of a file in blocks of whole lines."""
    rest = b""
    file.seek(begin)
    while begin < end:
        block = file.read(min(_BLOCK, end - begin))
        if not block:  # the file was truncated
            break
        begin += len(block)
        whole, newline, last = block.rpartition(b"\n")
        if newline:
            yield rest + whole
            rest = last
        else:
            rest += block
        file.seek(begin)  # what gets the block may have read elsewhere
    if rest:
        yield rest


def _resume_marks(file: BinaryIO, end: int) -> Iterator[tuple[int, int]]:
    """Yield where the lines begin at which the run was resumed, and the step that it resumed at."""
    begin = 0
    for block in _blocks(file, 0, end):
        found = block.find(_MARK)
        while found >= 0:
            line_begin, line_end = block.rfind(b"\n", 0, found) + 1, block.find(b"\n", found)
            line_end = len(block) if line_end < 0 else line_end
            for mark in (row for batch in parse_lines([block[line_begin:line_end]]) for row in batch):
                step = mark.get("step", mark.get("resumed"))
                if "resumed" in mark and type(step) is int:
                    yield begin + line_begin, step
            found = block.find(_MARK, line_end)
        begin += len(block) + 1


def _last_steps(resumed_at: Sequence[int | None]) -> list[int | None]:
    """Return the last step that counts of each attempt: the first one that a later attempt began after."""
    limits: list[int | None] = []
    limit: int | None = None
    for step in reversed(resumed_at):
        limits.append(limit)
        limit = min((known for known in (limit, step) if known is not None), default=None)
    return limits[::-1]


def _is_after(row: dict[str, Any], limit: int) -> bool:
    step = row.get("step")
    return type(step) is int and step > limit


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


# ---- for users -------------------------------------------------------------------------------------------------------


def read_metrics(run_dir: Path | str | None) -> list[dict[str, Any]]:
    """Read a run's metrics: one row per step, in order of first appearance; later lines of a step win, per field.

    A resumed run repeats the steps after its checkpoint, and a step may have several lines, because its validation
    comes later. The line that marks where it resumed is not a row. A line that was torn by a kill is left out with a
    `RuntimeWarning`.
    """
    reader = RunReader(directory_of(run_dir))
    rows = rows_of_steps(reader)
    reader.warn_of_torn_lines()
    return rows


def rows_of_steps(reader: RunReader) -> list[dict[str, Any]]:
    """Return the rows of metrics, one for each step."""
    steps: dict[int, dict[str, Any]] = {}
    for rows in reader.metrics():
        for row in rows:
            if type(row.get("step")) is not int or row.keys() - RESERVED == {"resumed"}:
                continue
            row.pop("resumed", None)
            for name, value in row.items():  # all metrics are numbers, also one that is named `error`
                if isinstance(value, str):
                    row[name] = NON_FINITE.get(value, value)
            steps.setdefault(row["step"], {}).update(row)
    return list(steps.values())


def read_events(run_dir: Path | str | None) -> list[dict[str, Any]]:
    """Read a run's events in the order of their times; those that concern one rank other than 0 have its `rank`."""
    reader = RunReader(directory_of(run_dir))
    events = reader.events()
    reader.warn_of_torn_lines()
    return events
