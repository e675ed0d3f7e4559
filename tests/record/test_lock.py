"""Test that a run directory has one writer, and that a dead one does not keep it."""

import errno
import gc
import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hookline._fs import describe_process, is_process_alive
from hookline.errors import RecordError
from hookline.record import Record, lock
from hookline.record.lock import RunLock

HOLD = """
import sys, time, os
from pathlib import Path
from hookline.record.lock import RunLock
held = RunLock(Path(sys.argv[1]))
{more}
print("held", flush=True)
time.sleep(60)
"""
FORK = """
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print("child", child)
"""


def start_holder(directory: Path, more: str = "") -> subprocess.Popen[str]:
    """Start another process that holds the lock."""
    command = [sys.executable, "-c", HOLD.format(more=more), str(directory)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def read_until_held(holder: subprocess.Popen[str]) -> int | None:
    """Wait until the other process holds the lock; return the id of its child, if it printed one."""
    assert holder.stdout is not None
    child = None
    while (line := holder.stdout.readline().split()) and line[0] != "held":
        child = int(line[1])
    assert line == ["held"]
    return child


def test_a_second_writer_raises(tmp_path: Path) -> None:
    """The error names the process; once that is killed, the next writer gets the lock."""
    with start_holder(tmp_path) as holder:
        read_until_held(holder)
        with pytest.raises(RecordError, match=rf"is being written by process {holder.pid} on "):
            RunLock(tmp_path)
        holder.kill()
    RunLock(tmp_path).release()
    assert not (tmp_path / ".lock").exists()


def test_children_of_a_killed_owner_do_not_keep_it(tmp_path: Path) -> None:
    """Loader workers outlive a killed parent by seconds; the run may resume at once."""
    with start_holder(tmp_path, FORK) as holder:
        child = read_until_held(holder)
        holder.kill()
    assert child is not None
    try:
        os.kill(child, 0)
        RunLock(tmp_path).release()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_second_writer_in_the_same_process_raises(tmp_path: Path) -> None:
    """Two trainers of one process cannot write one run; once the first lock is released or dropped, the second can."""
    first = RunLock(tmp_path)
    with pytest.raises(RecordError, match="is being written by this process"):
        RunLock(tmp_path / ".." / tmp_path.name)
    first.release()
    first.release()
    second = RunLock(tmp_path)
    del second
    RunLock(tmp_path).release()


def test_a_record_holds_the_lock_until_its_close(tmp_path: Path) -> None:
    """From the record's construction until its close."""
    record = Record.on_disk(tmp_path, config={}, seed=None, run_id="r")
    with pytest.raises(RecordError, match="is being written by"):
        Record.on_disk(tmp_path, config={}, seed=None, run_id="r")
    record.start([])
    record.close("completed", None, [], [], {})
    Record.on_disk(tmp_path, config={}, seed=None, run_id="r").close("completed", None, [], [], {})


def test_a_record_that_is_dropped_releases_the_lock_at_once(tmp_path: Path) -> None:
    """It is not part of a reference cycle, which would keep the lock until the next garbage collection."""
    gc.disable()
    try:
        record = Record.on_disk(tmp_path, config={}, seed=None, run_id="r")
        record.log(1, 0, "loss", 1.0)
        del record
        Record.on_disk(tmp_path, config={}, seed=None, run_id="r").close("completed", None, [], [], {})
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("owner", "lives"),
    [
        (describe_process(), True),
        ({**describe_process(), "started": "1"}, False),
        ({**describe_process(), "pid": 2**22 + 1}, False),
        ({**describe_process(), "host": "elsewhere"}, True),
        ({"host": platform.node()}, False),
        ({"host": platform.node(), "pid": -1}, False),
    ],
    ids=["itself", "the id was reused", "gone", "another machine", "no id", "no process"],
)
def test_process_liveness(owner: dict[str, Any], lives: bool) -> None:
    """Id and start time together identify a process; those of other hosts count as alive."""
    assert is_process_alive(owner) is lives


@pytest.mark.parametrize("known", [True, False], ids=["file system without locks", "system without locks"])
def test_without_record_locks_the_file_decides(known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A living owner keeps the lock; a dead one, a torn file or an empty one does not."""
    if known:

        def refuse(*_: Any) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(lock.fcntl, "lockf", refuse)
    else:
        monkeypatch.setattr(lock, "fcntl", None)
    owner = {**describe_process(), "host": "another-host"}
    (tmp_path / ".lock").write_text(json.dumps(owner))
    with pytest.raises(RecordError, match=f"process {os.getpid()} on another-host"):
        RunLock(tmp_path)
    for stale in (json.dumps({**describe_process(), "started": "1"}), "{torn", "[]", ""):
        (tmp_path / ".lock").write_text(stale)
        RunLock(tmp_path).release()
