"""Which checkpoints stay, and deletion that a crash at any moment cannot turn into a loss."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookline.checkpoints import disk, list_checkpoints, newest_good, retention, verify_checkpoint, write_checkpoint
from hookline.checkpoints.retention import (
    ALL,
    Kept,
    best_first,
    delete_checkpoint,
    delete_checkpoints,
    point_to,
    surplus,
    would_be_kept,
)

SCORES = st.lists(st.one_of(st.none(), st.integers(0, 5).map(float)), max_size=12)


def write(*steps: int) -> Path:
    """Small checkpoints of these steps; the directory they are in."""
    for step in steps:
        write_checkpoint(Path("held"), f"step-{step}", {"model": {"step": step}}, {"step": step})
    return Path("held")


def names(directory: Path) -> list[str]:
    """What is there, hidden things included."""
    return sorted(entry.name for entry in directory.iterdir())


def damage(path: Path) -> None:
    """Change a byte of its state."""
    state = path / "state.json"
    state.write_bytes(state.read_bytes().replace(b"step", b"stop", 1))


@given(scores=SCORES, top_k=st.integers(0, 4), mode=st.sampled_from(["min", "max"]))
def test_the_best_are_those_of_a_brute_force_search(scores: list[float | None], top_k: int, mode: str) -> None:
    """Taking each into the best as it comes ends with the best of all; of equal ones the first stays."""
    kept: list[Kept] = []
    for step, score in enumerate(scores):
        if score is not None and would_be_kept(score, kept, top_k, mode):
            kept.append(Kept(f"step-{step}", step, score))
            doomed = surplus(kept, top_k, mode, keep_last=False)
            kept = [one for one in kept if one not in doomed]
    finite = [(score if mode == "min" else -score, step) for step, score in enumerate(scores) if score is not None]
    assert [one.step for one in best_first(kept, mode)] == [step for _, step in sorted(finite)[:top_k]]


def test_keeping_all_and_keeping_the_last() -> None:
    """-1 keeps all; the last one stays whatever its score, and one without a score is never the best."""
    kept = [Kept("a", 1, 0.5), Kept("b", 2, None), Kept("c", 3, 0.7)]
    assert surplus(kept, ALL, "min", keep_last=False) == [] and would_be_kept(9.9, kept, ALL, "min")
    assert [one.name for one in surplus(kept, 1, "min", keep_last=False)] == ["b", "c"]
    assert [one.name for one in surplus(kept, 1, "min", keep_last=True)] == ["b"]
    assert [one.name for one in best_first(kept, "max")] == ["c", "a"]


def test_the_newest_two_that_verify_are_never_deleted() -> None:
    """A damaged checkpoint does not count as one of the two, unless this process wrote it and knows better."""
    directory = write(1, 2, 3, 4)
    damage(directory / "step-4")
    assert delete_checkpoints(directory, ["step-1", "step-2", "step-3"]) == ["step-1"]
    assert names(directory) == ["step-2", "step-3", "step-4"]
    assert delete_checkpoints(directory, ["step-2", "step-3"], trusted={"step-3", "step-4"}) == ["step-2"]


def test_what_is_not_there_is_gone() -> None:
    """A checkpoint that somebody else deleted is no error."""
    assert delete_checkpoints(write(1), ["step-7"]) == ["step-7"]
    assert names(Path("held")) == ["step-1"]


@pytest.mark.parametrize("moment", ["rename", "sync", "first file", "second file"])
def test_a_crash_while_deleting_leaves_it_whole_or_swept(moment: str) -> None:
    """At no moment is there a checkpoint with a name and without a file; the next save sweeps what is left."""
    directory = write(1, 2)
    pid = os.fork()
    if pid == 0:  # dies in the middle of it
        crash_at(moment)
        delete_checkpoint(directory / "step-1")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert all(verify_checkpoint(path) == [] for path in list_checkpoints(directory))
    assert newest_good(directory) == (directory / "step-2", [])
    write(3)
    left = ["step-1", "step-2", "step-3"] if moment == "rename" else ["step-2", "step-3"]
    assert names(directory) == left


def crash_at(moment: str) -> None:
    """Let this process die when the deletion gets there."""
    unlink, calls = os.unlink, [0]

    def die(*args: object, **kwargs: object) -> None:
        os._exit(9)

    def unlink_some(*args: object, **kwargs: object) -> None:
        calls[0] += 1
        if calls[0] == {"first file": 1, "second file": 2}[moment]:
            os._exit(9)
        unlink(*args, **kwargs)  # type: ignore[arg-type]

    if moment == "rename":
        Path.rename = die  # type: ignore[assignment, method-assign]
    elif moment == "sync":
        disk.sync_directory = retention.disk.sync_directory = die  # type: ignore[assignment]
    else:
        os.unlink = unlink_some  # type: ignore[assignment]


def test_a_link_is_moved_in_one_go() -> None:
    """It leads to its neighbour, is no checkpoint itself, and the one before it is replaced, not followed."""
    directory = write(1, 2)
    for step in (1, 2, 2):
        point_to(directory / "best", f"step-{step}")
        assert (directory / "best").resolve() == (directory / f"step-{step}").resolve()
    assert names(directory) == ["best", "step-1", "step-2"]
    assert [path.name for path in list_checkpoints(directory)] == ["step-2", "step-1"]
    assert verify_checkpoint(directory / "best") == []
