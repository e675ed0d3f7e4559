"""Test that whatever the disk refuses, and wherever a process dies, the newest good checkpoint loads."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_checkpoints import verify_checkpoint

from hookline import _fs
from hookline.checkpoints.store import newest_good, read_checkpoint, write_checkpoint
from hookline.errors import CheckpointError

CALLS = ("open", "write", "fsync", "rename")
ERRORS = (errno.ENOSPC, errno.EACCES, errno.EIO)


class Died(BaseException):
    """Stand for the death of the process: nothing that it would have done afterwards is done."""


class FaultyOs:
    """The module `os` for `hookline._fs`; the call with the given number fails, and after a death all do."""

    def __init__(self, fail_at: int, error: int | None) -> None:
        self.fail_at, self.error = fail_at, error
        self.calls: list[str] = []
        self.dead = False

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self._watched(name, real) if name in CALLS else real

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if len(self.calls) - 1 == self.fail_at:
                self._fail(name, real, arguments)
            if self.dead:
                raise Died
            return real(*arguments)

        return call

    def _fail(self, name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if name == "write":  # half of it arrives
            real(arguments[0], arguments[1][: len(arguments[1]) // 2])
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        self.dead = True


def save(directory: Path, step: int) -> Path:
    """Write a small checkpoint with two files of tensors."""
    state = {"model": {"w": torch.full((40,), float(step))}, "optimizers": [{"m": torch.arange(9)}], "none": {}}
    return write_checkpoint(directory, f"step-{step:08d}", state, {"step": step})


def calls_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return which calls a save makes, in order."""
    with monkeypatch.context() as patched:
        patched.setattr(_fs, "os", watch := FaultyOs(-1, None))
        save(tmp_path / "counted", 1)
    return watch.calls


def break_disk(patched: pytest.MonkeyPatch, fail_at: int, error: int | None) -> FaultyOs:
    """Make one call fail; a dead process removes nothing."""
    faulty = FaultyOs(fail_at, error)
    patched.setattr(_fs, "os", faulty)
    real = shutil.rmtree
    patched.setattr(shutil, "rmtree", lambda *a, **k: None if faulty.dead else real(*a, **k))
    return faulty


def test_the_order_of_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is synced after its last write, then the directory, then renamed, then the parent synced."""
    calls = calls_of_a_save(tmp_path, monkeypatch)
    assert calls[:2] == ["open", "fsync"]  # the new directory's name
    per_file = " ".join(calls[2:-5]).split("open")[1:]
    assert len(per_file) == 4 and all(call.split()[-1] == "fsync" and "write" in call for call in per_file)
    assert calls[-5:] == ["open", "fsync", "rename", "open", "fsync"]


@pytest.mark.parametrize("error", [*ERRORS, None], ids=["ENOSPC", "EACCES", "EIO", "death"])
def test_every_call_may_fail(error: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each open, write, fsync and rename: the error is raised, nothing partial verifies, the old one loads."""
    count = len(calls_of_a_save(tmp_path, monkeypatch))
    assert count > 15
    for fail_at in range(count - 2):  # the first two were made by `make_directory` for the first save
        directory = tmp_path / f"at-{fail_at}"
        old = save(directory, 1)
        with monkeypatch.context() as patched:
            break_disk(patched, fail_at, error)
            with pytest.raises(Died if error is None else CheckpointError) as raised:
                save(directory, 2)
        assert error is None or os.strerror(error) in str(raised.value)
        newest, passed_over = newest_good(directory)
        assert newest is not None and passed_over == []
        renamed = fail_at >= count - 4  # the name is there, only its durability was not confirmed
        assert newest.path.name == ("step-00000002" if renamed else "step-00000001")
        assert read_checkpoint(newest.path)[0]["model"]["w"][0] == (2 if renamed else 1)
        assert verify_checkpoint(old) == []
        assert error is None or not [entry for entry in directory.iterdir() if entry.name.startswith(".")]


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that accepts a few bytes at a time gets all of them."""
    real = os.write
    monkeypatch.setattr(_fs.os, "write", lambda fd, data: real(fd, data[:7]))
    assert verify_checkpoint(save(tmp_path, 1)) == []


@pytest.mark.parametrize(("code", "works"), [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False)])
def test_a_directory_that_cannot_be_synced(
    code: int, works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system without the operation is not a failure; one that reports an error is."""
    real = os.fsync

    def fsync(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").resolve().is_dir():
            raise OSError(code, os.strerror(code))
        real(fd)

    monkeypatch.setattr(_fs.os, "fsync", fsync)
    if works:
        assert verify_checkpoint(save(tmp_path, 1)) == []
    else:
        with pytest.raises(CheckpointError, match="Input/output error"):
            save(tmp_path, 1)
