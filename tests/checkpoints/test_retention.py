"""Test which checkpoints are kept, and that a crash during a deletion loses nothing else."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookline.checkpoints import list_checkpoints, newest_good, retention, verify_checkpoint, write_checkpoint
from hookline.checkpoints.retention import (
    KEEP_ALL,
    RankedCheckpoint,
    best_first,
    delete_checkpoint,
    delete_checkpoints,
    is_among_best,
    surplus,
    update_link,
)

SCORES = st.lists(st.one_of(st.none(), st.integers(0, 5).map(float)), max_size=12)


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


@given(scores=SCORES, top_k=st.integers(0, 4), mode=st.sampled_from(["min", "max"]))
def test_ranking_agrees_with_a_brute_force_search(scores: list[float | None], top_k: int, mode: str) -> None:
    """Ranking each checkpoint as it is saved ends with the best of all; of equal scores the first stays."""
    kept: list[RankedCheckpoint] = []
    for step, score in enumerate(scores):
        if score is not None and is_among_best(score, kept, top_k, mode):
            kept.append(RankedCheckpoint(f"step-{step}", step, score))
            doomed = surplus(kept, top_k, mode, keep_last=False)
            kept = [one for one in kept if one not in doomed]
    finite = [(score if mode == "min" else -score, step) for step, score in enumerate(scores) if score is not None]
    assert [one.step for one in best_first(kept, mode)] == [step for _, step in sorted(finite)[:top_k]]


def test_keeping_all_and_keeping_the_last() -> None:
    """-1 keeps all; the last one stays whatever its score, and one without a score is never the best."""
    kept = [RankedCheckpoint("a", 1, 0.5), RankedCheckpoint("b", 2, None), RankedCheckpoint("c", 3, 0.7)]
    assert surplus(kept, KEEP_ALL, "min", keep_last=False) == [] and is_among_best(9.9, kept, KEEP_ALL, "min")
    assert [one.name for one in surplus(kept, 1, "min", keep_last=False)] == ["b", "c"]
    assert [one.name for one in surplus(kept, 1, "min", keep_last=True)] == ["b"]
    assert [one.name for one in best_first(kept, "max")] == ["c", "a"]


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
    """Make this process exit when the deletion reaches a certain call."""
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
        retention.sync_directory = die  # type: ignore[assignment]
    else:
        os.unlink = unlink_some  # type: ignore[assignment]


def test_a_link_is_replaced_atomically() -> None:
    """It leads to its neighbour, is not listed as a checkpoint, and is replaced, not followed."""
    directory = write(1, 2)
    for step in (1, 2, 2):
        update_link(directory / "best", f"step-{step}")
        assert (directory / "best").resolve() == (directory / f"step-{step}").resolve()
    assert names(directory) == ["best", "step-1", "step-2"]
    assert [path.name for path in list_checkpoints(directory)] == ["step-2", "step-1"]
    assert verify_checkpoint(directory / "best") == []
