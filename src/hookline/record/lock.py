"""Allow one writer per run directory, with a lock that a dead owner does not keep.

Where the system has record locks, it releases them when the owner dies, and forked loader workers do not inherit them.
Where it has none, the owner's process id and start time in the lock file tell whether it is still alive.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import ClassVar
from weakref import WeakValueDictionary

from hookline._fs import describe_process, is_process_alive
from hookline.errors import RecordError

try:
    import fcntl
except ImportError:  # a system without record locks
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"


class RunLock:
    """A lock on a run directory, held from construction until `release` or until it is garbage collected."""

    # Record locks belong to the process: a second one in this process would be granted, so these are checked first.
    _held: ClassVar[WeakValueDictionary[Path, RunLock]] = WeakValueDictionary()

    def __init__(self, directory: Path) -> None:
        self._path = directory.resolve() / NAME
        self._fd: int | None = None
        if self._path in RunLock._held:
            raise _error(self._path, "this process")
        self._fd, self._pid = _open_locked(self._path), os.getpid()
        RunLock._held[self._path] = self

    def release(self) -> None:
        """Let the next writer in; a second call does nothing."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        RunLock._held.pop(self._path, None)
        if os.getpid() == self._pid:  # a forked child has this object, but not the lock
            with contextlib.suppress(OSError):
                self._path.unlink()  # before closing, while the lock is still ours
        os.close(fd)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.release()


def _open_locked(path: Path) -> int:
    """Open the lock file and lock it; again if the file was removed in between, because it locks nothing then."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            _lock(fd, path)
            if os.path.samestat(os.fstat(fd), path.stat()):
                os.ftruncate(fd, 0)
                os.pwrite(fd, json.dumps(describe_process()).encode("ascii"), 0)
                return fd
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _lock(fd: int, path: Path) -> None:
    locked_elsewhere = False
    if fcntl is not None:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:  # otherwise the file system has no locks, and the file's process is checked
            locked_elsewhere = isinstance(error, (BlockingIOError, PermissionError))
    # The owner is read even if the system decides, because the error names it.
    try:
        owner = json.loads(os.pread(fd, 4096, 0))
    except (OSError, ValueError):
        owner = None
    known = isinstance(owner, dict)
    if locked_elsewhere or (known and is_process_alive(owner)):
        raise _error(path, f"process {owner.get('pid')} on {owner.get('host')}" if known else "another process")


def _error(path: Path, owner: str) -> RecordError:
    return RecordError(
        f"{path.parent} is being written by {owner}; two writers would damage it. Wait until it ends or stop it; "
        f"if it is certainly gone, remove {path}"
    )
