"""Allow one writer per run directory, with a lock that a dead owner does not keep.

Where the system has `flock`, the lock belongs to the open file: reading, copying or closing the lock file elsewhere in
the process does not release it, and the system releases it when its owner dies. A forked child, such as a loader's
worker, would hold it as well and may outlive its parent, so children close the file at once. Where the system has no
locks, the owner's process id and start time in the lock file tell whether it is still alive.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import ClassVar
from weakref import WeakSet

from hookline._fs import describe_process, explain, is_process_alive, open_plain
from hookline.errors import RecordError

try:
    import fcntl
except ImportError:  # a system without locks
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"


class RunLock:
    """A lock on a run directory, held from construction until `release` or until it is garbage collected."""

    _held: ClassVar[WeakSet[RunLock]] = WeakSet()

    def __init__(self, directory: Path) -> None:
        self._path = directory.resolve() / NAME
        self._fd: int | None = None
        try:
            self._fd = _open_locked(self._path)
        except OSError as error:
            raise RecordError(explain(self._path, error)) from error
        RunLock._held.add(self)

    def release(self) -> None:
        """Let the next writer in; a second call does nothing."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()  # before closing, while the lock is still ours
            self._close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.release()

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        RunLock._held.discard(self)
        if fd is not None:
            os.close(fd)

    @classmethod
    def close_in_child(cls) -> None:
        """Give up every lock in a forked child; the parent keeps it."""
        for lock in list(cls._held):
            lock._close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=RunLock.close_in_child)


def _open_locked(path: Path) -> int:
    """Open the lock file and lock it; again if the file was removed in between, because it locks nothing then."""
    while True:
        fd = open_plain(path, os.O_RDWR | os.O_CREAT)
        try:
            _lock(fd, path)
            if os.path.samestat(os.fstat(fd), path.lstat()):
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
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:  # otherwise the file system has no locks, and the file's process is checked
            locked_elsewhere = isinstance(error, (BlockingIOError, PermissionError))
    # The owner is read even if the system decides, because the error names it.
    try:
        owner = json.loads(os.pread(fd, 4096, 0))
    except (OSError, ValueError, RecursionError):
        owner = None
    owner = owner if isinstance(owner, dict) else {}
    if not locked_elsewhere and not (owner and is_process_alive(owner)):
        return
    name = f"process {owner.get('pid')} on {owner.get('host')}" if owner else "another process"
    name = "this process" if owner == describe_process() else name
    raise RecordError(
        f"{path.parent} is being written by {name}; two writers would damage it. Wait until it ends or stop it; "
        f"if it is certainly gone, remove {path}"
    )
