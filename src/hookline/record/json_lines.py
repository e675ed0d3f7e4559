"""Write JSON files: one ``write()`` per line for files that grow, an atomic replacement for files that change."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookline._fs import explain, open_plain, write_atomic
from hookline.errors import RecordError
from hookline.record import strict_json

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
