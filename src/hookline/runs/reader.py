"""`RunReader`: reads the files of a run, each of them once, without the rows that a resumed run has discarded.

A run that resumes repeats the steps after its checkpoint, so rows of an earlier attempt count up to the step at which a
later one began. Files are read in blocks. It needs no torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from hookline._fs import NotAPlainFile, TooLarge, explain, open_to_read, read_whole
from hookline._limits import line_limit
from hookline.errors import RecordError
from hookline.record.format import (
    CONFIG_FILE,
    DAMAGED,
    EVENTS_FILE,
    HEADER_FIELDS,
    LAYERS_FILE,
    MAX_STEP,
    MEDIA_FILE,
    METRICS_FILE,
    NON_FINITE,
    RESERVED,
    RUN_FILE,
    Floats,
    SeriesHeader,
    check_run,
    read_header,
    unpack,
)
from hookline.record.json_lines import (
    TOO_LONG,
    as_number,
    parse_json,
    parse_lines,
    read_blocks,
    read_bytes,
    reading,
    restore_numbers,
    warn_at_caller,
    whole_end,
)
from hookline.record.labels import Labels, read_labels
from hookline.record.lock import has_owner
from hookline.runs.config import read_config

MAX_TAIL_BYTES = 4 << 20  # from the end of a file: the most that a list of runs may read of each, to stay quick
TAIL_BYTES = 64 << 10  # hundreds of rows of metrics
FOLLOWED_BYTES = 1 << 20  # from the end of a file that is followed: the rows that are there first
_MARK = b'"resumed":'


@dataclass
class Damage:
    """Lines of a file that were left out, because they are not whole or lack what every row has."""

    first: int
    """The number of the first one, from 1."""
    count: int = 0
    is_torn: bool = True
    """Whether a kill explains them: each is the last line of an attempt, and is not whole."""
    longest: int | None = None
    """How many bytes a line may have, if one of them has more."""

    def __str__(self) -> str:
        """Return what is wrong, without the file.

        >>> str(Damage(5, count=3, is_torn=False))
        'line 5 and 2 more are damaged'
        """
        lines = f"line {self.first:,}" + (f" and {self.count - 1:,} more" if self.count > 1 else "")
        if self.is_torn:
            return f"{lines} {'were' if self.count > 1 else 'was'} torn because the run was killed"
        why = "" if self.longest is None else f" (a line has more than {self.longest:,} bytes, the limit)"
        return f"{lines} {'are' if self.count > 1 else 'is'} damaged{why}"


class RunReader:
    """Reads the files of a run's directory, even while they are written or after the writer was killed.

    Nothing is read before it is needed. Small files are kept in memory; rows are yielded in blocks.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.damage: dict[str, Damage] = {}
        """By file: the lines that were left out, of the files that were read."""
        self._ends: dict[str, bytes] = {}  # the last bytes of files that were read whole

    @cached_property
    def run(self) -> dict[str, Any]:
        """The fields of run.json. Raises `RecordError` if the directory is not a run, or has a newer format."""
        try:
            run = parse_json(read_whole(self.path / RUN_FILE), partial(json.loads, parse_int=_parse_int))
        except (NotAPlainFile, TooLarge) as error:
            raise RecordError(explain(self.path / RUN_FILE, error, "read")) from error
        except (OSError, ValueError) as error:
            missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
            why = f"has no {RUN_FILE}" if missing else f"its {RUN_FILE} cannot be read or is damaged"
            raise RecordError(f"{self.path} is not a run: {why}; a run's directory is runs/<run_id>") from error
        if not isinstance(run, dict) or not isinstance(run.get("run_id"), str):
            raise RecordError(f"{self.path} is not a run: its {RUN_FILE} was not written by Hookline")
        check_run(self.path, run)
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
        return read_bytes(self.path / CONFIG_FILE)

    @cached_property
    def config(self) -> Any:
        """The contents of config.yaml. Raises `RecordError` if it cannot be read."""
        return read_config(self.config_bytes, self.path / CONFIG_FILE)

    @cached_property
    def has_owner(self) -> bool:
        """Whether a process is writing the run."""
        return has_owner(self.path)

    # ---- rows --------------------------------------------------------------------------------------------------------

    def metrics(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows of metrics.jsonl in batches; each has a step."""
        return (self._usable(METRICS_FILE, *batch, has_step) for batch in self._rows(METRICS_FILE))

    def layers(self) -> Iterator[tuple[int, SeriesHeader, Floats]]:
        """Yield the steps of layers.jsonl: the step, what its values mean, and the values in the shape of the header.

        A run that recorded no layers has no such file.
        """
        if self._is_missing(LAYERS_FILE):
            return
        headers: dict[int, SeriesHeader] = {}  # a resumed run defines its ids again
        for numbers, rows in self._rows(LAYERS_FILE):
            for number, row in zip(numbers, rows, strict=True):
                if "resumed" in row:
                    continue
                try:
                    if row.keys() >= HEADER_FIELDS:
                        headers.pop(row["series"], None)  # lines of a damaged header must not use an earlier one
                        headers[row["series"]] = read_header(row)
                        continue
                    header = headers[row["series"]]
                    values = unpack(row, header.shape) if has_step(row) else None
                except DAMAGED:
                    values = None
                if values is None:
                    self._note_damage(LAYERS_FILE, number)
                else:
                    yield row["step"], header, values

    def events(self) -> list[dict[str, Any]]:
        """Return the events of all ranks in the order of their times; events of ranks other than 0 have a `rank`.

        Raises:
            RecordError: If a file cannot be read.
        """
        events: list[dict[str, Any]] = []
        for path in (self.path / EVENTS_FILE, *sorted((self.path / "ranks").glob(f"*/{EVENTS_FILE}"))):
            name = path.relative_to(self.path).as_posix()
            for batch in self._rows(name):
                events += self._usable(name, *batch, _is_event)
        restore_numbers(events)
        return sorted(events, key=lambda event: as_number(event.get("time")) or 0.0)

    def media_lines(self) -> list[dict[str, Any]]:
        """Return the lines of media.jsonl, the newest first; if several have one name and step, only the last.

        A run that recorded neither tables nor images has no such file.
        """
        batches = [] if self._is_missing(MEDIA_FILE) else self._rows(MEDIA_FILE)
        rows = [row for batch in batches for row in self._usable(MEDIA_FILE, *batch, _is_media)]
        newest: dict[tuple[int, str], dict[str, Any]] = {}
        for row in reversed(rows):
            if "resumed" not in row:
                newest.setdefault((row["step"], row["name"]), row)
        return list(newest.values())

    def _is_missing(self, name: str) -> bool:
        """Return whether a run has no file of this name; a directory that is not a run raises an error."""
        return not os.path.lexists(self.path / name) and os.path.isdir(self.path)  # noqa: PTH112 - never raises

    def warn_of_damage(self, ignore_torn: bool = False) -> None:
        """Warn of the lines that were left out of the files that were read, or only of those that no kill explains."""
        for name, damage in self.damage.items():
            if ignore_torn and damage.is_torn:
                continue
            warn_at_caller(f"{self.path / name}: {damage}; the other lines were read")

    def _note_damage(self, name: str, number: int, is_torn: bool = False) -> None:
        damage = self.damage.setdefault(name, Damage(number))
        damage.first, damage.count = min(damage.first, number), damage.count + 1
        damage.is_torn = damage.is_torn and is_torn

    def _usable(
        self, name: str, numbers: Sequence[int], rows: list[dict[str, Any]], is_usable: Callable[[dict[str, Any]], bool]
    ) -> list[dict[str, Any]]:
        """Return the rows that pass a test; the others are damaged."""
        if all(map(is_usable, rows)):
            return rows
        for number, row in zip(numbers, rows, strict=True):
            if not is_usable(row):
                self._note_damage(name, number)
        return [*filter(is_usable, rows)]

    def _rows(self, name: str) -> Iterator[tuple[Sequence[int], list[dict[str, Any]]]]:
        """Yield the rows of a file in batches, with the numbers of their lines from 1.

        Rows that a resumed run has discarded are left out. A line that is not whole is torn if it is the last one of an
        attempt, and damaged otherwise.
        """
        path = self.path / name
        with reading(path):
            file = open_to_read(path)
        with file:
            end = whole_end(file, lambda: self.has_owner)
            file.seek(max(end - MAX_TAIL_BYTES, 0))
            self._ends[name] = file.read(end - file.tell())
            is_ended = self._ends[name].endswith(b"\n")
            longest = line_limit(path.name)
            marks = [*_resume_marks(file, end, longest)]
            begins = [0, *(begin for begin, _ in marks)]
            # The rows of an attempt count up to the first step that a later one began after.
            limits = [*accumulate((step for _, step in reversed(marks)), min, initial=math.inf)][::-1]
            number = 1  # The number of the next line.
            for begin, stop, limit in zip(begins, [*begins[1:], end], limits, strict=True):
                broken: list[int] = []  # the number of the last line that is not whole
                for _, block in read_blocks(file, begin, stop, longest):
                    if block == TOO_LONG:
                        self._note_damage(name, number)
                        self.damage[name].longest = longest
                        number += 1
                        continue
                    lines = block.split(b"\n")
                    for numbers, rows, not_whole in parse_lines(lines, number):
                        broken += not_whole
                        for place in broken[:-1]:  # at once, because an arbitrary file may have many
                            self._note_damage(name, place)
                        del broken[:-1]
                        if limit < math.inf:
                            kept = [place for place, row in enumerate(rows) if not _is_after(row, limit)]
                            numbers, rows = [numbers[place] for place in kept], [rows[place] for place in kept]
                        yield numbers, rows
                    number += len(lines)
                for place in broken:
                    was_killed = place == number - 1 and (stop < end or not is_ended)
                    self._note_damage(name, place, is_torn=was_killed)

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
                for row in (row for _, rows, _ in parse_lines([line]) for row in rows):
                    if (step := _resumed_at(row)) is not None:
                        last_step = min(last_step, step)
                    elif not _is_after(row, last_step):
                        has_row = True
                        yield row

    def follow(self, name: str) -> Iterator[list[dict[str, Any]]]:
        """Yield the last rows of a file, then, each time that it is asked, those that were appended; it never ends.

        A line that is not whole yet is left for the next time. A file may be missing at first; one that is truncated or
        replaced is read from its beginning.
        """
        path, place, inode = self.path / name, None, None
        while True:
            rows: list[dict[str, Any]] = []
            with suppress(OSError), open_to_read(path) as file:
                status, is_cut = os.fstat(file.fileno()), False
                if place is None:
                    place = max(status.st_size - FOLLOWED_BYTES, 0)
                    is_cut = place > 0  # it begins in the middle of a line
                elif status.st_size < place or inode != status.st_ino:
                    place = 0
                begin, inode = place, status.st_ino
                place = max(begin, end := whole_end(file, lambda: True))
                blocks = read_blocks(file, begin, end, line_limit(name))
                rows = [row for _, text in blocks for _, parsed, _ in parse_lines(text.split(b"\n")) for row in parsed]
                rows = rows[is_cut:]
            place = place or 0
            yield rows

    def read_end(self, name: str) -> None:
        """Read the last 4 MB of a file, so that `last_lines` need not open it again each time."""
        if name in self._ends:
            return
        with suppress(OSError), open_to_read(self.path / name) as file:
            file.seek(max(file.seek(0, os.SEEK_END) - MAX_TAIL_BYTES, 0))
            self._ends[name] = file.read(MAX_TAIL_BYTES)

    def last_lines(self, name: str) -> Iterator[bytes]:
        """Yield the last lines of a file, the newest first; more is read when needed, up to 4 MB."""
        if name in self._ends:
            end = self._ends[name]
            yield from reversed(end.split(b"\n")[len(end) == MAX_TAIL_BYTES :])  # the first one may begin before
            return
        with suppress(OSError), open_to_read(self.path / name) as file:
            size = begin = file.seek(0, os.SEEK_END)
            first = b""  # the line that begins before what was read
            while begin > 0 and size - begin < MAX_TAIL_BYTES:
                block = min(begin, max(TAIL_BYTES, size - begin))  # as much as before, so that long lines are not slow
                begin -= block
                file.seek(begin)
                first, *lines = (file.read(block) + first).split(b"\n")
                yield from reversed(lines)
            if begin == 0:
                yield first


def _parse_int(digits: str) -> float:
    """Return an integer; one that no float holds is infinite, so that nothing that calculates with it can fail."""
    return int(digits) if len(digits) < 300 else float(digits)


def _resume_marks(file: BinaryIO, end: int, longest: int) -> Iterator[tuple[int, int]]:
    """Yield where the lines begin at which the run was resumed, and the step that it resumed at."""
    for begin, block in read_blocks(file, 0, end, longest):
        place = block.find(_MARK)
        while place >= 0:
            line_begin, line_end = block.rfind(b"\n", 0, place) + 1, block.find(b"\n", place)
            line_end = len(block) if line_end < 0 else line_end
            for row in (row for _, rows, _ in parse_lines([block[line_begin:line_end]]) for row in rows):
                if (step := _resumed_at(row)) is not None:
                    yield begin + line_begin, step
            place = block.find(_MARK, line_end)


def _resumed_at(row: dict[str, Any]) -> int | None:
    """Return the step at which a row says that the run was resumed; None for other rows, events among them."""
    step = row.get("step", row.get("resumed"))
    return step if "resumed" in row and "kind" not in row and type(step) is int else None


def _is_after(row: dict[str, Any], limit: float) -> bool:
    step = row.get("step")
    return type(step) is int and step > limit


# ---- which rows are usable; the others are damaged -------------------------------------------------------------------


def has_step(row: dict[str, Any]) -> bool:
    """Return whether a row has a step that every reader of JSON reads exactly."""
    return type(step := row.get("step")) is int and -MAX_STEP <= step <= MAX_STEP


def _is_event(row: dict[str, Any]) -> bool:
    return isinstance(row.get("kind"), str) and (row.get("step") is None or has_step(row))


def _is_media(row: dict[str, Any]) -> bool:
    is_named = has_step(row) and isinstance(row.get("name"), str)
    is_dated = type(row.get("epoch")) is int and as_number(row.get("time")) is not None
    return "resumed" in row or (is_named and is_dated)


# ---- columns ---------------------------------------------------------------------------------------------------------


def columns_of_rows(rows: Sequence[dict[str, Any]]) -> dict[str, tuple[list[int], list[Any]]]:
    """Return the steps and the values of each field, in the order of the rows."""
    if len(set(map(len, rows))) == 1:
        with suppress(KeyError):  # Some rows have other fields; most have the same.
            values = {name: [row[name] for row in rows] for name in rows[0]}
            return {name: (values["step"], column) for name, column in values.items()}
    columns: dict[str, tuple[list[int], list[Any]]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in columns:
                columns[name] = [], []
            steps, cells = columns[name]
            steps.append(row["step"])
            cells.append(value)
    return columns


# ---- for users -------------------------------------------------------------------------------------------------------


def read_metrics(run_dir: Path | str | None) -> list[dict[str, Any]]:
    """Read a run's metrics: one row per step, in order of first appearance; later lines of a step win, per field.

    A resumed run repeats the steps after its checkpoint, and a step may have several lines, because its validation
    comes later. The line that marks where it resumed is not a row. Lines that are torn by a kill or damaged are left
    out with a `RuntimeWarning`, which has their number.
    """
    from hookline.runs.named import find_files  # That module imports this one.

    reader = find_files(run_dir)
    rows = rows_of_steps(reader)
    reader.warn_of_damage()
    return rows


def rows_of_steps(reader: RunReader) -> list[dict[str, Any]]:
    """Return the rows of metrics, one for each step."""
    steps: dict[int, dict[str, Any]] = {}
    for rows in reader.metrics():
        for row in rows:
            if row.keys() - RESERVED == {"resumed"}:
                continue
            row.pop("resumed", None)
            for name, value in row.items():  # all metrics are numbers, even one that is named `error`
                if isinstance(value, str):
                    row[name] = NON_FINITE.get(value, value)
            steps.setdefault(row["step"], {}).update(row)
    return list(steps.values())


def read_events(run_dir: Path | str | None) -> list[dict[str, Any]]:
    """Read a run's events in the order of their times; those that concern one rank other than 0 have its `rank`."""
    from hookline.runs.named import find_files  # That module imports this one.

    reader = find_files(run_dir)
    events = reader.events()
    reader.warn_of_damage()
    return events
