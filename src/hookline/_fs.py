"""Write files durably and atomically, open them without following links, and tell whether a process is alive.

Every call by which the record, a checkpoint or a capture reaches the disk is here. The functions raise `OSError`;
callers turn it into their own error with `explain`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import secrets
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from hookline._limits import size_limit

Part = bytes | memoryview

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
# Opening a pipe without O_NONBLOCK waits for its other end.
_PLAIN = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
_MAX_WRITE = 64 << 20  # Linux accepts at most 2 GB per write()
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP)  # some network file systems cannot sync a directory
_NAME_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


class NotAPlainFile(OSError):
    """A symbolic link, a pipe or a device is in the place of a plain file or a directory of a run."""


class TooLarge(OSError):
    """A file has more bytes than one of its name may have; see `_limits.py`."""


def open_plain(path: Path, flags: int) -> int:
    """Open a file and return its descriptor. Raises `NotAPlainFile` for a link, which may lead anywhere, and a pipe."""
    refuse_link(path)
    fd = os.open(path, flags | _PLAIN, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotAPlainFile(errno.EINVAL, "it is not a plain file", str(path))
    return fd


def open_to_read(path: Path) -> BinaryIO:
    """Open a plain file for reading. Raises `NotAPlainFile` for a link, a pipe and a device."""
    return open(open_plain(path, os.O_RDONLY), "rb")


def read_whole(path: Path, limit: int | None = None) -> bytes:
    """Read a plain file. Raises `TooLarge`, before reading, if it is larger than files with its name may be."""
    limit = size_limit(path.name) if limit is None else limit
    with open_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size
        check_size(path, size, limit)
        return file.read(size)  # it may be growing


def check_size(path: Path, size: int, limit: int) -> None:
    """Raise `TooLarge` if a file has, or would get, more bytes than it may have."""
    if size > limit:
        raise TooLarge(errno.EFBIG, f"it has {size:,} bytes, and {limit:,} is the limit", str(path))


def refuse_link(path: Path) -> None:
    """Raise `NotAPlainFile` if a path is a symbolic link; links above it do not matter."""
    if path.is_symlink():
        raise NotAPlainFile(
            errno.ELOOP, "it is a symbolic link, which may point outside the run's directory", str(path)
        )


def write_file(path: Path, parts: Iterable[Part]) -> None:
    """Create a file, write the parts, and wait until the disk has them."""
    fd = os.open(path, _CREATE, 0o666)
    try:
        for part in parts:
            data, start = memoryview(part), 0
            while start < len(data):
                start += os.write(fd, data[start : start + _MAX_WRITE])
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace a file: a reader or a crash sees the old contents or the new ones, never a part of either.

    Args:
        path: The file.
        data: Its new contents.
        durable: Whether to wait until the disk has it; otherwise a failure of the machine may damage it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        # A file object instead of `write_file`: tests that simulate a full disk for checkpoints replace `os.write`, and
        # the record must still be able to say so.
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
        with contextlib.suppress(OSError):  # the data is safe; only the rename may not be durable yet
            if durable:
                sync_directory(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def make_directory(directory: Path) -> None:
    """Create a directory and its parents unless they exist, each name durable in the directory above."""
    missing = [place for place in (directory, *directory.parents) if not place.exists()]
    for place in reversed(missing):
        place.mkdir(exist_ok=True)
        sync_directory(place.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable, where the file system supports that."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(fd)


def rename_to_free_name(temporary: Path, path: Path) -> Path:
    """Rename a directory to `path`, with -1, -2 … appended if the name is taken; never overwrites anything."""
    free, count = path, 0
    while True:
        if not os.path.lexists(free):
            try:
                os.rename(temporary, free)  # noqa: PTH104 - tests replace `os.rename` to simulate failing disks
                return free
            except OSError as error:  # another process took the name in the meantime
                if error.errno not in _NAME_TAKEN:
                    raise
        count += 1
        free = path.with_name(f"{path.name}-{count}")


def current_directory() -> Path:
    """Return the current directory; if it was removed, its last name, under which no file can be written."""
    try:
        return Path.cwd()
    except OSError:
        return Path(os.environ.get("PWD", os.curdir))


def relative_to_here(path: Path) -> Path:
    """Return a path relative to the current directory, unless it is elsewhere or that directory was removed."""
    with contextlib.suppress(OSError, ValueError):
        return path.relative_to(Path.cwd())
    return path


def explain(path: Path, error: OSError, verb: str = "write") -> str:
    """Return the message about a file that cannot be written or read: what failed, why, and the remedy."""
    remedy = "free space, fix its permissions or choose another directory"
    if isinstance(error, NotAPlainFile):
        remedy = "remove it, or replace it with a copy of its target"
    elif isinstance(error, TooLarge) and verb == "read":
        remedy = "it is damaged or was not written by Hookline, so replace it with an undamaged copy"
    elif isinstance(error, TooLarge):
        remedy = "store large values as tensors or in your own files, and keep only their names here"
    return f"cannot {verb} {path}: {error.strerror or error}; {remedy}"


# ---- processes -------------------------------------------------------------------------------------------------------


def describe_process(pid: int | None = None) -> dict[str, Any]:
    """Identify a process of this host, by default this one, by its id, start time and host, because ids are reused."""
    pid = os.getpid() if pid is None else pid
    return {"pid": pid, "started": _start_time(pid), "host": platform.node()}


def is_process_alive(process: Mapping[str, Any]) -> bool:
    """Return whether a process identified by `describe_process` still runs; True for another host's, as unknown."""
    if process.get("host") != platform.node():
        return True
    pid = process.get("pid")
    return isinstance(pid, int) and is_pid_alive(pid) and process.get("started") == _start_time(pid)


def is_pid_alive(pid: int) -> bool:
    """Return whether a process of this host has the id, possibly not the process that first had it."""
    if pid <= 0:  # `kill` would take these for a group of processes
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it exists and belongs to another user
        pass
    return True


def _start_time(pid: int) -> str | None:
    """Return a process's start time in kernel ticks; None where /proc does not exist."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return stat.rpartition(b")")[2].split()[19].decode("ascii")  # field 22; the name before it may contain anything
