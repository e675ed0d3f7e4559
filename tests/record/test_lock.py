"""Test that a run directory has one writer, and that a dead one does not keep it."""

import errno
import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hookline.errors import RecordError
from hookline.record import Record

HOLD = """
import sys, time, os
from hookline.record import Record
held = Record.on_disk(sys.argv[1], config={{}}, seed=None, run_id="r")
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


def open_record(root: Path) -> Record:
    """Open the record of one run, which is always the same."""
    return Record.on_disk(root, config={}, seed=None, run_id="r")


def close(record: Record) -> None:
    """Close the record."""
    record.close("completed", None, [], [], {})


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
            open_record(tmp_path)
        holder.kill()
    close(open_record(tmp_path))
    assert not (tmp_path / "r" / ".lock").exists()


def test_children_of_a_killed_owner_do_not_keep_it(tmp_path: Path) -> None:
    """Loader workers outlive a killed parent by seconds; the run may resume at once."""
    with start_holder(tmp_path, FORK) as holder:
        child = read_until_held(holder)
        holder.kill()
    assert child is not None
    try:
        os.kill(child, 0)
        close(open_record(tmp_path))
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_second_writer_in_the_same_process_raises(tmp_path: Path) -> None:
    """Two trainers of one process cannot write one run, until the first record is closed."""
    first = open_record(tmp_path)
    with pytest.raises(RecordError, match="is being written by this process"):
        open_record(tmp_path / ".." / tmp_path.name)
    close(first)
    close(first)
    close(open_record(tmp_path))


def test_a_record_that_is_dropped_releases_the_lock_at_once(tmp_path: Path) -> None:
    """It is not part of a reference cycle, which would keep the lock until the next garbage collection."""
    gc.disable()
    try:
        record = open_record(tmp_path)
        record.log(1, 0, "loss", 1.0)
        record.flush()
        del record
        close(open_record(tmp_path))
    finally:
        gc.enable()


@pytest.mark.parametrize("known", [True, False], ids=["file system without locks", "system without locks"])
@pytest.mark.parametrize(
    ("change", "lives"),
    [
        ({}, True),
        ({"started": "1"}, False),
        ({"pid": 2**22 + 1}, False),
        ({"host": "elsewhere"}, True),
        ({"pid": None}, False),
        ({"pid": -1}, False),
    ],
    ids=["itself", "the id was reused", "gone", "another machine", "no id", "no process"],
)
def test_without_record_locks_the_file_decides(
    known: bool, change: dict[str, Any], lives: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Id and start time together identify the owner; a living one, or one of another host, keeps the lock."""
    remove_locks(known, monkeypatch)
    record, file = open_record(tmp_path), tmp_path / "r" / ".lock"
    owner = {**json.loads(file.read_text()), **change}
    close(record)
    file.write_text(json.dumps(owner))
    if lives:
        with pytest.raises(RecordError, match=f"process {owner['pid']} on {owner['host']}"):
            open_record(tmp_path)
    else:
        close(open_record(tmp_path))


@pytest.mark.parametrize("text", ["{torn", "[]", ""])
def test_a_damaged_lock_file_keeps_no_writer_out(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner died while it wrote the file."""
    remove_locks(False, monkeypatch)
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / ".lock").write_text(text)
    close(open_record(tmp_path))


def remove_locks(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a file system without record locks, or a system that does not even know them."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    if known:
        monkeypatch.setattr("hookline.record.lock.fcntl.lockf", refuse)
    else:
        monkeypatch.setattr("hookline.record.lock.fcntl", None)
