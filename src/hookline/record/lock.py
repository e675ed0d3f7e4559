"""Allow one writer per run directory, with a lock that a dead owner does not keep.

The lock belongs to the open directory and the open lock file: reading, copying or closing the file elsewhere in the
process does not release it, nor does removing the file, and the system releases it when its owner dies. NFS locks files
only. A forked child, such as a loader's worker, would hold the lock as well and may outlive its parent, so children
close both at once. Where a file system has no locks, the owner's process id and start time in the lock file tell
whether it is still alive.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

from hookline._fs import describe_process, explain, is_process_alive, open_plain
from hookline.errors import RecordError

NAME = ".lock"


class RunLock:
    """A lock on a run directory, held from construction until `release` or until it is garbage collected."""

    _held: ClassVar[WeakSet[RunLock]] = WeakSet()

    def __init__(self, directory: Path) -> None:
        self._path = directory.resolve() / NAME
        self._fds: list[int] = []
        try:
            self._acquire()
        except BaseException as error:
            self._close()
            if isinstance(error, OSError):
                raise RecordError(explain(self._path, error)) from error
            raise
        RunLock._held.add(self)

    def _acquire(self) -> None:
        """Lock the directory and the file in it; again if the file was removed in between."""
        while not self._fds:
            self._fds.append(os.open(self._path.parent, os.O_RDONLY))
            file = open_plain(self._path, os.O_RDWR | os.O_CREAT)
            self._fds.append(file)
            _lock(self._fds, self._path)
            try:
                is_there = os.path.samestat(os.fstat(file), self._path.lstat())
            except FileNotFoundError:
                is_there = False
            if is_there:
                os.ftruncate(file, 0)
                os.pwrite(file, json.dumps(describe_process()).encode("ascii"), 0)
            else:
                self._close()

    def release(self) -> None:
        """Let the next writer in; a second call does nothing."""
        if self._fds:
            with contextlib.suppress(OSError):
                self._path.unlink()  # before closing, while the lock is still ours
            self._close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.release()

    def _close(self) -> None:
        RunLock._held.discard(self)
        while self._fds:
            os.close(self._fds.pop())

    @classmethod
    def close_in_child(cls) -> None:
        """Give up every lock in a forked child; the parent keeps it."""
        for lock in list(cls._held):
            lock._close()


os.register_at_fork(after_in_child=RunLock.close_in_child)


def has_owner(directory: Path) -> bool:
    """Return whether a living process holds the lock of a run; never takes the lock itself, even for a moment.

    A process on another machine counts as alive as long as its lock file exists.
    """
    try:
        file = open_plain(directory / NAME, os.O_RDONLY)
    except OSError:
        return False
    try:
        owner = _read_owner(file)
    finally:
        os.close(file)
    return bool(owner) and is_process_alive(owner)


def _read_owner(file: int) -> dict[str, Any]:
    """Return the process that has written the lock file; empty if it does not say."""
    try:
        owner = json.loads(os.pread(file, 4096, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _lock(fds: list[int], path: Path) -> None:
    """Lock the open directory and the open file (the last of `fds`), or raise an error that names the owner."""
    locked, locked_elsewhere = False, False
    for fd in fds:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except OSError as error:  # otherwise the file system has no such locks
            locked_elsewhere = locked_elsewhere or isinstance(error, (BlockingIOError, PermissionError))
    if locked and not locked_elsewhere:
        return
    # The owner is read even if the system decides, because the error names it.
    owner = _read_owner(fds[-1])
    if not locked_elsewhere and not (owner and is_process_alive(owner)):
        return
    name = f"process {owner.get('pid')} on {owner.get('host')}" if owner else "another writer"
    name = "this process" if owner == describe_process() else name
    remedy = "" if locked_elsewhere else f"; if you are sure that it is gone, remove {path}"
    raise RecordError(
        f"{path.parent} is being written by {name}; two writers would damage it. "
        f"Wait until it ends, or stop it and the processes that it started{remedy}"
    )
