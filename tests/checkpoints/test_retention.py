"""Test which checkpoints are kept, and that a crash during a deletion loses nothing else."""

import os
from pathlib import Path

import pytest
from saved_checkpoints import list_checkpoints, verify_checkpoint

from hookline.checkpoints.retention import delete_checkpoints
from hookline.checkpoints.store import newest_good, write_checkpoint


def write(*steps: int) -> Path:
    """Write small checkpoints of these steps and return their directory."""
    for step in steps:
        write_checkpoint(Path("held"), f"step-{step}", {"model": {"step": step}}, {"step": step})
    return Path("held")


def names(directory: Path) -> list[str]:
    """List a directory, hidden entries included."""
    return sorted(entry.name for entry in directory.iterdir())


def damage(path: Path) -> None:
    """Change a byte of its state."""
    state = path / "state.json"
    state.write_bytes(state.read_bytes().replace(b"step", b"stop", 1))


def test_the_newest_two_that_verify_are_never_deleted() -> None:
    """A damaged checkpoint does not count as one of the two, unless this process wrote it and trusts it."""
    directory = write(1, 2, 3, 4)
    damage(directory / "step-4")
    assert delete_checkpoints(directory, ["step-1", "step-2", "step-3"]) == ["step-1"]
    assert names(directory) == ["step-2", "step-3", "step-4"]
    assert delete_checkpoints(directory, ["step-2", "step-3"], trusted={"step-3", "step-4"}) == ["step-2"]


def test_deleting_a_missing_checkpoint_is_not_an_error() -> None:
    """A checkpoint that another process deleted is not an error."""
    assert delete_checkpoints(write(1), ["step-7"]) == ["step-7"]
    assert names(Path("held")) == ["step-1"]


@pytest.mark.parametrize("moment", ["rename", "sync", "first file", "second file"])
def test_a_crash_while_deleting_leaves_it_whole_or_a_leftover(moment: str) -> None:
    """A named checkpoint never lacks a file; the next save removes leftovers."""
    directory = write(1, 2, 3)
    pid = os.fork()
    if pid == 0:  # dies in the middle of it
        crash_at(moment)
        delete_checkpoints(directory, ["step-1"])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert all(verify_checkpoint(path) == [] for path in list_checkpoints(directory))
    newest, problems = newest_good(directory)
    assert newest is not None and newest.path == directory / "step-3" and problems == []
    write(4)
    left = ["step-1", "step-2", "step-3", "step-4"] if moment == "rename" else ["step-2", "step-3", "step-4"]
    assert names(directory) == left


def crash_at(moment: str) -> None:
    """Make this process exit when the deletion reaches a certain call."""
    unlink, calls = os.unlink, [0]

    def die(*args: object, **kwargs: object) -> None:
        os._exit(9)

    def unlink_some(*args: object, **kwargs: object) -> None:
        calls[0] += 1
        if calls[0] == {"first file": 1, "second file": 2}[moment]:
            os._exit(9)
        unlink(*args, **kwargs)

    if moment == "rename":
        Path.rename = die
    elif moment == "sync":
        pytest.MonkeyPatch().setattr("hookline.checkpoints.retention.sync_directory", die)
    else:
        os.unlink = unlink_some
