"""Test that a run directory has one writer, and that a dead one does not keep it."""

import errno
import fcntl
import gc
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from records import close_record

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
    close_record(open_record(tmp_path))
    assert not (tmp_path / "r" / ".lock").exists()


def test_children_of_a_killed_owner_do_not_keep_it(tmp_path: Path) -> None:
    """Loader workers outlive a killed parent by seconds; the run may resume at once."""
    with start_holder(tmp_path, FORK) as holder:
        child = read_until_held(holder)
        holder.kill()
    assert child is not None
    try:
        os.kill(child, 0)
        close_record(open_record(tmp_path))
    finally:
        os.kill(child, signal.SIGKILL)


def test_reading_or_copying_the_lock_file_does_not_release_the_lock(tmp_path: Path) -> None:
    """A hook that copies the run's directory opens and closes `.lock` in the process that holds it."""
    copied = "\nimport shutil; shutil.copytree(held.path, sys.argv[1] + '/copy')\n(held.path / '.lock').read_bytes()\n"
    with start_holder(tmp_path, copied) as holder:
        read_until_held(holder)
        with pytest.raises(RecordError, match=f"process {holder.pid} on "):
            open_record(tmp_path)
        holder.kill()
    assert (tmp_path / "copy" / "metrics.jsonl").exists()


def test_removing_the_lock_file_lets_no_second_writer_in(tmp_path: Path) -> None:
    """The directory is locked as well, in the process that holds it and for others."""
    with start_holder(tmp_path) as holder:
        read_until_held(holder)
        (tmp_path / "r" / ".lock").unlink()
        for _ in range(2):
            with pytest.raises(RecordError, match="is being written by another writer"):
                open_record(tmp_path)
        holder.kill()
    record = open_record(tmp_path)
    (tmp_path / "r" / ".lock").unlink()
    with pytest.raises(RecordError, match="is being written by another writer"):
        open_record(tmp_path)
    close_record(record)
    close_record(open_record(tmp_path))
    assert not (tmp_path / "r" / ".lock").exists()


def test_a_file_system_that_locks_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS wants a descriptor that may write, which a directory has not; the lock file alone keeps others out."""

    def lock_files_only(fd: int, flags: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        real(fd, flags)

    real = fcntl.flock
    monkeypatch.setattr("hookline.record.lock.fcntl.flock", lock_files_only)
    record = open_record(tmp_path)
    (tmp_path / "r" / ".lock").write_text("")
    with pytest.raises(RecordError, match="is being written by another writer"):
        open_record(tmp_path)
    close_record(record)
    close_record(open_record(tmp_path))


WITH_WORKERS = """
import os, signal, sys, torch
from hookline import CheckpointHook, get_trainer

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        if index == 6 and sys.argv[2] == "block":
            print("blocked", os.getpid(), flush=True)
            signal.pause()
        return torch.full((3,), float(index)), torch.ones(1)

model = torch.nn.Linear(3, 1)
trainer = get_trainer(
    "simple", model, torch.utils.data.DataLoader(Data(), num_workers=1, prefetch_factor=2),
    torch.optim.SGD(model.parameters(), 1e-3), "cpu", loss_fn=torch.nn.functional.mse_loss,
    hooks=[CheckpointHook(save_every_n_steps=1)], output_dir=sys.argv[1], max_epochs=1, console=False,
)
trainer.fit(resume=sys.argv[3] if len(sys.argv) > 3 else None)
print("done", trainer.step)
"""


def test_a_killed_run_with_workers_resumes_at_once(tmp_path: Path) -> None:
    """A loader's worker that outlives its killed trainer does not keep the run locked."""
    command = [sys.executable, "-c", WITH_WORKERS, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([*command, "block"], stdout=subprocess.PIPE, text=True, env=environment) as trainer:
        worker = int(trainer.stdout.readline().split()[1])
        try:
            (run,) = tmp_path.iterdir()
            trainer.kill()
            trainer.wait()
            os.kill(worker, 0)
            resumed = subprocess.run([*command, "on", str(run)], capture_output=True, text=True, env=environment)
        finally:
            os.kill(worker, signal.SIGKILL)
    assert resumed.stdout.split() == ["done", "12"], resumed.stderr


def test_a_second_writer_in_the_same_process_raises(tmp_path: Path) -> None:
    """Two trainers of one process cannot write one run, until the first record is closed."""
    first = open_record(tmp_path)
    with pytest.raises(RecordError, match="is being written by this process"):
        open_record(tmp_path / ".." / tmp_path.name)
    close_record(first)
    close_record(first)
    close_record(open_record(tmp_path))


def test_a_record_that_is_dropped_releases_the_lock_at_once(tmp_path: Path) -> None:
    """It is not part of a reference cycle, which would keep the lock until the next garbage collection."""
    gc.disable()
    try:
        record = open_record(tmp_path)
        record.log(1, 0, "loss", 1.0)
        record.flush()
        del record
        close_record(open_record(tmp_path))
    finally:
        gc.enable()


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
def test_without_locks_the_file_decides(
    change: dict[str, Any], lives: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Id and start time together identify the owner; a living one, or one of another host, keeps the lock."""
    remove_locks(monkeypatch)
    record, file = open_record(tmp_path), tmp_path / "r" / ".lock"
    owner = {**json.loads(file.read_text()), **change}
    close_record(record)
    file.write_text(json.dumps(owner))
    if lives:
        name = f"process {owner['pid']} on {owner['host']}" if change else "this process"
        with pytest.raises(RecordError, match=f"is being written by {name}"):
            open_record(tmp_path)
    else:
        close_record(open_record(tmp_path))


@pytest.mark.parametrize("text", ["{torn", "[]", ""])
def test_a_damaged_lock_file_keeps_no_writer_out(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner died while it wrote the file."""
    remove_locks(monkeypatch)
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / ".lock").write_text(text)
    close_record(open_record(tmp_path))


def remove_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a file system without locks."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("hookline.record.lock.fcntl.flock", refuse)
