"""A run directory has one writer, and a dead one does not keep it."""

import errno
import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hookline.errors import RecordError
from hookline.record import RunRecord, lock
from hookline.record.lock import RunLock, describe_self, owner_lives, start_time

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
    """Another process that holds the lock."""
    command = [sys.executable, "-c", HOLD.format(more=more), str(directory)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def read_until_held(holder: subprocess.Popen[str]) -> int | None:
    """Wait until the other process has it; the process id of its child, if it said one."""
    assert holder.stdout is not None
    child = None
    while (line := holder.stdout.readline().split()) and line[0] != "held":
        child = int(line[1])
    assert line == ["held"]
    return child


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    """While another process writes, and by name; once that is killed, the next is let in."""
    with start_holder(tmp_path) as holder:
        read_until_held(holder)
        with pytest.raises(RecordError, match=rf"is being written by process {holder.pid} on "):
            RunLock(tmp_path)
        holder.kill()
    RunLock(tmp_path).release()
    assert not (tmp_path / ".lock").exists()


def test_children_of_a_killed_owner_do_not_keep_it(tmp_path: Path) -> None:
    """Loader workers live on for seconds after their parent was killed; the run may go on at once."""
    with start_holder(tmp_path, FORK) as holder:
        child = read_until_held(holder)
        holder.kill()
    assert child is not None
    try:
        os.kill(child, 0)
        RunLock(tmp_path).release()
    finally:
        os.kill(child, signal.SIGKILL)


def test_one_process_is_refused_twice_too(tmp_path: Path) -> None:
    """Two trainers of one process cannot write one run; when the first is closed or forgotten, the second can."""
    first = RunLock(tmp_path)
    with pytest.raises(RecordError, match="this very process"):
        RunLock(tmp_path / ".." / tmp_path.name)
    first.release()
    first.release()
    second = RunLock(tmp_path)
    del second
    RunLock(tmp_path).release()


def test_a_run_takes_and_returns_it(tmp_path: Path) -> None:
    """From the record's making until its close."""
    record = RunRecord.create(tmp_path, config={}, seed=None, run_id="r")
    with pytest.raises(RecordError, match="is being written by"):
        RunRecord.create(tmp_path, config={}, seed=None, run_id="r")
    record.start([])
    record.close("completed", None, [], [], {})
    RunRecord.create(tmp_path, config={}, seed=None, run_id="r").close("completed", None, [], [], {})


@pytest.mark.parametrize(
    ("owner", "lives"),
    [
        (describe_self(), True),
        ({**describe_self(), "started": "1"}, False),
        ({**describe_self(), "pid": 2**22 + 1}, False),
        ({**describe_self(), "host": "elsewhere"}, True),
        ({"host": platform.node()}, False),
        ({"host": platform.node(), "pid": -1}, False),
    ],
    ids=["itself", "the id was given out again", "gone", "another machine", "no id", "no process"],
)
def test_who_lives(owner: dict[str, Any], lives: bool) -> None:
    """Process id and start time together name a process; of other machines nothing is known."""
    assert owner_lives(owner) is lives


@pytest.mark.parametrize("known", [True, False], ids=["file system without locks", "system without locks"])
def test_without_locks_the_owners_words_count(known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A living owner is respected, a dead one's or nobody's words are not."""
    if known:

        def refuse(*_: Any) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(lock.fcntl, "lockf", refuse)
    else:
        monkeypatch.setattr(lock, "fcntl", None)
    parent = {**describe_self(), "pid": os.getppid(), "started": start_time(os.getppid())}
    (tmp_path / ".lock").write_text(json.dumps(parent))
    with pytest.raises(RecordError, match=f"process {os.getppid()}"):
        RunLock(tmp_path)
    for stale in (json.dumps({**describe_self(), "started": "1"}), "{torn", "[]", ""):
        (tmp_path / ".lock").write_text(stale)
        RunLock(tmp_path).release()
