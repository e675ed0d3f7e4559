"""How bytes become durable: every call by which a checkpoint reaches the disk stands here."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

Part = bytes | memoryview

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_AT_ONCE = 64 << 20  # bytes a write() is asked for; Linux takes 2 GB at most
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP)
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


def write_file(path: Path, parts: Iterable[Part]) -> None:
    """Write a new file and wait until the disk has it."""
    fd = os.open(path, _NEW, 0o666)
    try:
        for part in parts:
            _write_all(fd, memoryview(part))
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(directory: Path) -> None:
    """Make a directory with its parents, unless it is there; each new name is durable in the one above."""
    missing = [place for place in (directory, *directory.parents) if not place.exists()]
    for place in reversed(missing):
        place.mkdir(exist_ok=True)
        sync_directory(place.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable. Some network file systems cannot, and say so with EINVAL."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(fd)


def rename_to_free_name(temporary: Path, path: Path) -> Path:
    """Give a directory its name, with -1, -2 … appended where it is taken: nothing is ever overwritten."""
    free, count = path, 0
    while True:
        if not os.path.lexists(free):
            try:
                os.rename(temporary, free)  # noqa: PTH104 - every call to the system goes through `os` here
                return free
            except OSError as error:  # another process took the name since we looked
                if error.errno not in _TAKEN:
                    raise
        count += 1
        free = path.with_name(f"{path.name}-{count}")


def _write_all(fd: int, data: memoryview) -> None:
    start = 0
    while start < len(data):
        start += os.write(fd, data[start : start + _AT_ONCE])
