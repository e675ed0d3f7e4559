"""One writer per run directory: a lock that a dead owner does not keep.

Where the system has record locks it releases them when the owner dies, and forked loader workers do not inherit them.
Where it has none, the owner's process id and start time, written into the lock file, tell whether it still lives.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from hookline.errors import RecordError

try:
    import fcntl
except ImportError:  # a system without them
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"


class RunLock:
    """Held from its making until `release`; a lock that nobody refers to any more is released, too."""

    # Record locks are the process's own: a second one of this process would be granted, so these are looked up first.
    _held: ClassVar[WeakValueDictionary[Path, RunLock]] = WeakValueDictionary()

    def __init__(self, directory: Path) -> None:
        self._path = directory.resolve() / NAME
        self._fd: int | None = None
        if self._path in RunLock._held:
            raise _refusal(self._path, "this very process")
        self._fd, self._pid = _open_locked(self._path), os.getpid()
        RunLock._held[self._path] = self

    def release(self) -> None:
        """Let the next writer in; the second call does nothing."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        RunLock._held.pop(self._path, None)
        if os.getpid() == self._pid:  # a forked child has this object, but not the lock
            with contextlib.suppress(OSError):
                self._path.unlink()  # while it is still ours
        os.close(fd)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.release()


def _open_locked(path: Path) -> int:
    """Open the lock file and own it. One that was removed while we waited at its door is no lock any more."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            _take(fd, path)
            if _is_still_there(fd, path):
                os.ftruncate(fd, 0)
                os.pwrite(fd, json.dumps(describe_self()).encode("ascii"), 0)
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _take(fd: int, path: Path) -> None:
    if fcntl is not None:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except (BlockingIOError, PermissionError):
            raise _refusal(path, _name_of(_read_owner(fd))) from None
        except OSError:
            pass  # a file system without locks: ask the owner's own words
    owner = _read_owner(fd)
    if owner is not None and owner_lives(owner):
        raise _refusal(path, _name_of(owner))


def describe_self() -> dict[str, Any]:
    """Who holds the lock: a process id alone is given out again one day."""
    return {"pid": os.getpid(), "started": start_time(os.getpid()), "host": platform.node()}


def owner_lives(owner: dict[str, Any]) -> bool:
    """Whether the process that wrote this is still there; of another machine's we cannot know and say yes."""
    if owner.get("host") != platform.node():
        return True
    pid = owner.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it exists and belongs to somebody else
        pass
    return owner.get("started") == start_time(pid)


def start_time(pid: int) -> str | None:
    """When a process began, in the kernel's own clock; None where that cannot be read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return stat.rpartition(b")")[2].split()[19].decode("ascii")  # field 22; the name before may hold anything


def _is_still_there(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _read_owner(fd: int) -> dict[str, Any] | None:
    try:
        owner = json.loads(os.pread(fd, 4096, 0))
    except (OSError, ValueError):
        return None
    return owner if isinstance(owner, dict) else None


def _name_of(owner: dict[str, Any] | None) -> str:
    return "another process" if owner is None else f"process {owner.get('pid')} on {owner.get('host')}"


def _refusal(path: Path, owner: str) -> RecordError:
    return RecordError(
        f"{path.parent} is being written by {owner}; two writers would spoil it. Wait for its end or stop it; "
        f"if it is certainly gone, remove {path}"
    )
