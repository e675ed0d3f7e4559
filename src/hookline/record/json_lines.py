"""Read and write JSON files: one ``write()`` per line for files that grow, an atomic replacement for others."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hookline._console import warn
from hookline._fs import explain, open_plain, write_atomic
from hookline._nesting import MAX_DEPTH, TOO_DEEP, is_too_deep
from hookline.errors import RecordError
from hookline.record import strict_json
from hookline.record.format import FARTHEST_STEP, NON_FINITE, TEXT_FIELDS
from hookline.record.lock import has_owner

_BATCH = 10_000  # lines
_APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT


class JsonLines:
    """An append-only file of JSON records, one per line, unbuffered: a kill tears at most the last line.

    It is opened once, and never through a link. A line that an earlier process left torn is ended first, so that the
    next record is whole.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._fd: int | None = None
        try:
            self._fd = open_plain(self.path, _APPEND)
            # Appending ignores the position, so moving it is harmless.
            os.lseek(self._fd, max(os.fstat(self._fd).st_size - 1, 0), os.SEEK_SET)
            self._torn = os.read(self._fd, 1) not in (b"", b"\n")
        except OSError as error:
            self.close()
            raise RecordError(explain(self.path, error)) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record with one ``write()``, about 10 µs. Raises `RecordError` if the disk refuses."""
        self.write_line(strict_json.dumps(record).encode("ascii"))

    def write_line(self, record: bytes) -> None:
        """Append a record that is strict JSON already, without a newline."""
        if self._fd is None:
            raise RecordError(f"{self.path} is closed: this line came after the end of the run's record")
        line = b"\n" + record + b"\n" if self._torn else record + b"\n"
        try:
            written = os.write(self._fd, line)
            while written < len(line):  # the rest of a short write follows; if that fails, the line stays torn
                self._torn = True
                written += os.write(self._fd, line[written:])
            self._torn = False
            is_deleted = os.fstat(self._fd).st_nlink == 0
        except OSError as error:
            raise RecordError(explain(self.path, error)) from error
        if is_deleted:  # the system accepts the line, and nobody can read it
            raise RecordError(f"{self.path} was deleted while the run was writing it; its lines are lost")

    def sync(self) -> None:
        """Wait until the disk has what was written. Raises `RecordError` if it refuses."""
        try:
            if self._fd is not None:
                os.fsync(self._fd)
        except OSError as error:
            raise RecordError(explain(self.path, error)) from error

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def write_json_atomic(path: Path | str, value: Any) -> None:
    """Replace a JSON file atomically. Raises `RecordError` and leaves the old file if the disk refuses."""
    write_text_atomic(path, strict_json.dumps(value, indent=2) + "\n")


def write_text_atomic(path: Path | str, text: str) -> None:
    """Replace a text file atomically. Raises `RecordError` and leaves the old file if the disk refuses."""
    try:
        write_atomic(Path(path), text.encode("utf-8"))
    except OSError as error:
        raise RecordError(explain(Path(path), error)) from error


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_json(path: Path | str) -> dict[str, Any]:
    """Read one JSON object from a file. Raises `RecordError` if it is missing or is not a JSON object."""
    record = _parse(read_bytes(Path(path)))
    if record is None:
        raise RecordError(f"{path} is not a JSON object; it is damaged or was not written by Hookline")
    return record


def read_jsonl(path: Path | str) -> tuple[list[dict[str, Any]], bool]:
    """Read the whole lines of a file; also return whether any line is incomplete, as after a kill during its write.

    The strings that stand for non-finite numbers become numbers again, except in fields that contain text.
    """
    return read_records(Path(path), Path(path).parent)


def read_records(path: Path, run_dir: Path) -> tuple[list[dict[str, Any]], bool]:
    """Read the whole lines of a file of a run, as `read_jsonl` does.

    Args:
        path: The file.
        run_dir: The run's directory, whose owner may be writing the last line.

    Returns:
        The lines, and whether any other line is incomplete.

    Raises:
        RecordError: If the file cannot be read.
    """
    lines = [line for line in read_lines(path, run_dir).split(b"\n") if line]
    records = [record for batch in parse_lines(lines) for record in batch]
    for record in records:
        for key, value in record.items():
            if isinstance(value, str) and value in NON_FINITE and key not in TEXT_FIELDS:
                record[key] = NON_FINITE[value]
    return records, len(records) < len(lines)


def warn_of_torn_line(path: Path) -> None:
    """Warn that a line of a file was left out."""
    warn_at_caller(f"{path}: a line was torn because its writer was killed; the whole lines were read")


def warn_at_caller(message: str) -> None:
    """Issue a `RuntimeWarning` at the line that called the public reader."""
    depth = 1
    ours = ("hookline.record.", "hookline.runs.", "functools.")  # which reads `load_run(…).media`
    while f"{sys._getframe(depth).f_globals.get('__name__')}.".startswith(ours):
        depth += 1
    warn(message, stacklevel=depth + 1)


def directory_of(run_dir: Path | str | None) -> Path:
    """Return the directory of a run; `trainer.run_dir` is None without one."""
    if run_dir is None:
        raise RecordError("this run has no directory: it keeps its record in memory (record=False), or has not begun")
    return Path(run_dir)


def parse_lines(lines: Sequence[bytes]) -> Iterator[list[dict[str, Any]]]:
    """Yield the JSON objects of many lines in batches, without lines that are torn.

    A batch is parsed as one array, which is three times as fast as line by line.
    """
    for begin in range(0, len(lines), _BATCH):
        batch = lines[begin : begin + _BATCH]
        try:
            records = parse_json(b"[%s]" % b",".join(batch))
        except ValueError:
            records = []
        if len(records) == len(batch) and set(map(type, records)) == {dict}:
            yield records
        else:  # one of the lines is torn
            yield [record for line in batch if (record := _parse(line)) is not None]


def read_lines(path: Path, run_dir: Path) -> bytes:
    """Read a file of lines, without a last line that the process which owns the run is still writing.

    Raises:
        RecordError: If the file cannot be read.
    """
    content = read_bytes(path)
    is_ended = not content or content.endswith(b"\n")
    return content if is_ended or not has_owner(run_dir) else content[: content.rfind(b"\n") + 1]


def as_number(value: Any) -> float | None:
    """Return a number of a record; None for what is not one, which a damaged or foreign record may have instead.

    The strings that stand for non-finite numbers are numbers. An integer that is too large for a float is infinite.
    """
    if isinstance(value, str):
        return NON_FINITE.get(value)
    try:
        return float(value) if isinstance(value, (int, float)) else None
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return a mapping of a record; an empty one for what is not one."""
    return value if isinstance(value, Mapping) else {}


def mappings_in(value: Any) -> list[Mapping[str, Any]]:
    """Return the mappings in a list of a record; none for what is not a list."""
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def is_step(value: Any) -> bool:
    """Return whether a value of a record can be a step."""
    return type(value) is int and abs(value) <= FARTHEST_STEP


def read_bytes(path: Path) -> bytes:
    """Read a plain file. Raises `RecordError` if it cannot be read."""
    try:
        with open(open_plain(path, os.O_RDONLY), "rb") as stream:  # noqa: PTH123 - a descriptor, not a path
            return stream.read()
    except (OSError, ValueError, MemoryError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error) or "it does not fit into memory"
        raise RecordError(f"cannot read {path}: {reason}. A run's directory is runs/<run_id>") from error


def parse_json(text: bytes) -> Any:
    """Return what a JSON text contains. Raises `ValueError` if it is not JSON, or nested deeper than records are."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    lines = len(value) if isinstance(value, list) else 0
    # Counting brackets is quick, and almost always enough.
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH + lines and is_too_deep(value):
        raise ValueError(TOO_DEEP)
    return value


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
