"""Read and write JSON files: one ``write()`` per line for files that grow, an atomic replacement for others."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from hookline._console import warn
from hookline._fs import (
    NotAPlainFile,
    TooLarge,
    check_size,
    explain,
    open_plain,
    open_to_read,
    read_whole,
    write_atomic,
)
from hookline._limits import MAX_DEPTH, TOO_DEEP, is_too_deep, line_limit, size_limit
from hookline.errors import RecordError, shown
from hookline.record import strict_json
from hookline.record.format import NON_FINITE, TEXT_FIELDS
from hookline.record.lock import has_owner

TOO_LONG = b"\0"  # stands for a line over the length limit
_BATCH = 10_000  # lines
_BLOCK = 8 << 20  # bytes that are parsed together
_STEP_BACK = 64 << 10  # bytes
_APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `RecordError`, with a remedy, if the disk refuses an operation of the block."""
    try:
        yield
    except OSError as error:
        raise RecordError(explain(path, error)) from error


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
        with writing(self.path):
            check_size(self.path, len(record), line_limit(self.path.name))
            written = os.write(self._fd, line)
            while written < len(line):  # the rest of a short write follows; if that fails, the line stays torn
                self._torn = True
                written += os.write(self._fd, line[written:])
            self._torn = False
            is_deleted = os.fstat(self._fd).st_nlink == 0
        if is_deleted:  # the system accepts the line, but it cannot be read
            raise RecordError(f"{self.path} was deleted while the run was writing it; its lines are lost")

    def sync(self) -> None:
        """Wait until everything written is on disk. Raises `RecordError` if it refuses."""
        with writing(self.path):
            if self._fd is not None:
                os.fsync(self._fd)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def write_json_atomic(path: Path | str, value: Any) -> None:
    """Replace a JSON file atomically. If writing fails, raise `RecordError` and keep the old file."""
    write_text_atomic(path, strict_json.dumps(value, indent=2) + "\n")


def write_text_atomic(path: Path | str, text: str) -> None:
    """Replace a text file atomically. If writing fails, raise `RecordError` and keep the old file."""
    data = text.encode("utf-8")
    with writing(Path(path)):
        check_size(Path(path), len(data), size_limit(Path(path).name))
        write_atomic(Path(path), data)


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
    path = Path(path)
    records, count = list[dict[str, Any]](), 0
    with reading(path), open_to_read(path) as file:
        for _, block in read_blocks(file, 0, whole_end(file, lambda: has_owner(path.parent)), line_limit(path.name)):
            lines = [line for line in block.split(b"\n") if line]
            records += [record for _, batch, _ in parse_lines(lines) for record in batch]
            count += len(lines)
    restore_numbers(records)
    return records, len(records) < count


def whole_end(file: BinaryIO, is_written: Callable[[], bool]) -> int:
    """Return where a file ends, without a last line that a process is still writing."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(end - 1, 0))
    if file.read(1) in (b"", b"\n") or not is_written():
        return end
    while end:
        begin = max(end - _STEP_BACK, 0)
        file.seek(begin)
        if (newline := file.read(end - begin).rfind(b"\n")) >= 0:
            return begin + newline + 1
        end = begin
    return 0


def read_blocks(file: BinaryIO, begin: int, end: int, longest: int) -> Iterator[tuple[int, bytes]]:
    """Yield a part of a file in blocks of whole lines, and where they begin.

    A line longer than `longest` becomes its own block, `TOO_LONG`, and is not read into memory.
    """
    at, rest, is_too_long = begin, b"", False
    file.seek(begin)
    while begin < end:
        block = file.read(min(_BLOCK, end - begin))
        if not block:  # the file was truncated
            break
        begin += len(block)
        whole, newline, last = block.rpartition(b"\n")
        if newline and is_too_long:
            yield at, TOO_LONG
            tail, newline, whole = whole.partition(b"\n")
            at, is_too_long = begin - len(block) + len(tail) + 1, False
        if newline:
            yield at, rest + whole
        if len(last) < len(block):
            at, rest = begin - len(last), last
        elif not is_too_long:
            rest += block
        if len(rest) > longest:
            rest, is_too_long = b"", True
        file.seek(begin)  # the caller that got the block may have read elsewhere
    if rest or is_too_long:
        yield at, TOO_LONG if is_too_long else rest


def restore_numbers(records: Iterable[dict[str, Any]]) -> None:
    """Replace the strings that stand for non-finite numbers, except in fields that contain text."""
    for record in records:
        for key, value in record.items():
            if isinstance(value, str) and value in NON_FINITE and key not in TEXT_FIELDS:
                record[key] = NON_FINITE[value]


def warn_at_caller(message: str) -> None:
    """Issue a `RuntimeWarning` at the line that called the public reader."""
    depth = 1
    ours = ("hookline.record.", "hookline.runs.", "functools.")  # functools reads the cached `load_run(…).media`.
    while f"{sys._getframe(depth).f_globals.get('__name__')}.".startswith(ours):
        depth += 1
    warn(message, stacklevel=depth + 1)


def directory_of(run_dir: Path | str | None) -> Path:
    """Return the directory of a run; `trainer.run_dir` is None without one."""
    if run_dir is None:
        raise RecordError("this run has no directory: it keeps its record in memory (record=False), or has not begun")
    if not isinstance(run_dir, (str, os.PathLike)):
        raise RecordError(f"expected a run or a checkpoint, by its path or name, got {shown(run_dir)}")
    return Path(run_dir)


def parse_lines(
    lines: Sequence[bytes], first: int = 1
) -> Iterator[tuple[Sequence[int], list[dict[str, Any]], Sequence[int]]]:
    """Yield the JSON objects of many lines in batches: the numbers of their lines, and they themselves.

    The third part of a batch has the numbers of torn or damaged lines; `first` is the number of the first line.

    A batch is parsed as one array by pydantic's parser, which is ten times as fast as line by line.
    """
    from pydantic_core import from_json  # imported late: a process that only writes records does not need it

    for begin in range(0, len(lines), _BATCH):
        batch = lines[begin : begin + _BATCH]
        try:
            records = parse_json(b"[%s]" % b",".join(batch), from_json)
        except ValueError:
            records = []
        if len(records) == len(batch) and set(map(type, records)) == {dict}:
            yield range(first + begin, first + begin + len(batch)), records, ()
        else:  # one of the lines is not whole, or empty, or has half a character, which only Python's parser accepts
            parsed = {number: _parse(line) for number, line in enumerate(batch, first + begin) if line}
            whole = {number: record for number, record in parsed.items() if record is not None}
            yield [*whole], [*whole.values()], [number for number in parsed if number not in whole]


def as_number(value: Any) -> float | None:
    """Return a number from a record; None for anything else, which a damaged or foreign record may contain.

    The strings that stand for non-finite numbers are numbers.
    """
    if isinstance(value, str):
        return NON_FINITE.get(value)
    try:
        return float(value) if isinstance(value, (int, float)) else None
    except OverflowError:  # an integer that no float holds
        return None


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return a mapping from a record; an empty one for anything else."""
    return value if isinstance(value, Mapping) else {}


def read_bytes(path: Path) -> bytes:
    """Read a plain file. Raises `RecordError` if it cannot be read."""
    with reading(path):
        return read_whole(path)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise `RecordError`, with a remedy, if a file cannot be read in the block."""
    try:
        yield
    except (NotAPlainFile, TooLarge) as error:
        raise RecordError(explain(path, error, "read")) from error
    except (OSError, ValueError, MemoryError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error) or "it does not fit into memory"
        raise RecordError(f"cannot read {path}: {reason}. A run's directory is runs/<run_id>") from error


def parse_json(text: bytes, parse: Callable[[bytes], Any] = json.loads) -> Any:
    """Return the value of a JSON string. Raises `ValueError` if it is not JSON, or nested deeper than records are."""
    try:
        value = parse(text)
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
