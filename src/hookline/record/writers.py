"""How the record reaches the disk: one write() per line for what grows, a rename for what changes."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookline.errors import RecordError
from hookline.record import jsonsafe

_APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)


class JsonLines:
    """An append-only file of JSON records, one a line, unbuffered: a kill tears at most the last line.

    Opened once; a line left torn by an earlier process is ended first, so that the next record is whole.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._fd: int | None = None
        try:
            self._fd = os.open(self.path, _APPEND, 0o666)
            self._torn = _ends_torn(self._fd)
        except OSError as error:
            self.close()
            raise _cannot_write(self.path, error) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record with one ``write()``, some 10 µs. Raises `RecordError` when the disk refuses."""
        self.write_line(jsonsafe.dumps(record).encode("ascii"))

    def write_line(self, record: bytes) -> None:
        """The same for a record that is strict JSON already, without a line's end."""
        if self._fd is None:
            raise RecordError(f"{self.path} is closed: this record came after the run's record had ended")
        line = record + b"\n"
        try:
            self._append(self._fd, b"\n" + line if self._torn else line)
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def _append(self, fd: int, line: bytes) -> None:
        """One ``write()``; the rest of a short one follows, and what fails half-way is remembered as torn."""
        written = os.write(fd, line)
        while written < len(line):
            self._torn = True
            written += os.write(fd, line[written:])
        self._torn = False

    def sync(self) -> None:
        """Wait until the disk has what was written. Raises `RecordError` when it refuses."""
        try:
            if self._fd is not None:
                os.fsync(self._fd)
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def write_json_atomic(path: Path | str, value: Any) -> None:
    """Replace a JSON file so that a reader, or a crash, sees the old one or the new one, never a half."""
    write_text_atomic(path, jsonsafe.dumps(value, indent=2) + "\n")


def write_text_atomic(path: Path | str, text: str) -> None:
    """Write beside, fsync, rename: the file is always whole. Raises `RecordError` and leaves the old one."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        _write_durably(beside, text.encode("utf-8"))
        beside.replace(path)
        _sync_directory(path.parent)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    """Make the rename itself durable, where the file system lets directories be synced."""
    with contextlib.suppress(OSError):
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _ends_torn(fd: int) -> bool:
    size = os.fstat(fd).st_size
    if size == 0:
        return False
    os.lseek(fd, size - 1, os.SEEK_SET)  # appending ignores the position, so moving it is harmless
    return os.read(fd, 1) != b"\n"


def _cannot_write(path: Path, error: OSError) -> RecordError:
    reason = error.strerror or str(error)
    remedy = "free space, fix its permissions or choose another directory"
    return RecordError(f"cannot write {path}: {reason}; {remedy}")
