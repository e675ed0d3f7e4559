"""Test that a run knows where it came from, and that finding out never raises."""

import dataclasses
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline.errors import RecordError
from hookline.record import Record, config_hash, environment, git_state, new_run_id, provenance


def git(directory: Path, *arguments: str) -> str:
    """Run git in a directory with a fixed identity."""
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(directory), *identity, *arguments], capture_output=True, check=True)
    return done.stdout.decode().strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Make a repository with one commit of one file."""
    directory = tmp_path / "repository"
    directory.mkdir()
    git(directory, "init", "-q")
    (directory / "model.py").write_text("width = 1\n")
    git(directory, "add", ".")
    git(directory, "commit", "-q", "-m", "first")
    return directory


@pytest.mark.req("000-29")
def test_run_ids_are_unique_sortable_and_safe() -> None:
    """Two runs differ even in the same microsecond, a later one sorts later, and the id can name a file."""
    ids = [new_run_id() for _ in range(2000)]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"\d{8}-\d{6}-[0-9a-z]{8}", one) for one in ids)
    assert [one[:20] for one in ids] == sorted(one[:20] for one in ids)


def test_run_ids_leave_random_streams_alone() -> None:
    """Making an id draws no number from training's generators."""
    before = torch.get_rng_state()
    new_run_id()
    assert torch.equal(before, torch.get_rng_state())


def test_git_state_of_a_clean_repository(repository: Path) -> None:
    """A clean repository gives its commit and no difference; untracked files do not count."""
    (repository / "runs.txt").write_text("x")
    state = git_state(repository)
    assert state == {"commit": git(repository, "rev-parse", "HEAD"), "dirty": False, "diff_hash": None}


def test_git_state_of_a_changed_repository(repository: Path) -> None:
    """A change makes it dirty, and another change gives another hash, staged or not."""
    (repository / "model.py").write_text("width = 2\n")
    first = git_state(repository)
    git(repository, "add", ".")
    staged = git_state(repository)
    (repository / "model.py").write_text("width = 3\n")
    second = git_state(repository)
    assert first["dirty"] is second["dirty"] is True
    assert first["diff_hash"] == staged["diff_hash"] != second["diff_hash"]


def test_git_state_without_a_commit(tmp_path: Path) -> None:
    """The state is unknown outside a repository, without commits and for a missing directory."""
    unknown = {"commit": "unknown", "dirty": None, "diff_hash": None}
    git(tmp_path, "init", "-q", "empty")
    assert git_state(tmp_path / "empty") == unknown
    assert git_state(tmp_path / "missing") == unknown
    assert git_state("/") == unknown


def test_git_state_without_git(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without git is not an error."""
    monkeypatch.setenv("PATH", "")
    assert git_state(repository)["commit"] == "unknown"


def test_git_state_with_a_git_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A git that does not answer is abandoned after the time allowed for all its calls together."""
    slow = tmp_path / "git"
    slow.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(30)\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(provenance, "GIT_TIMEOUT_S", 0.3)
    started = time.monotonic()
    assert git_state(tmp_path)["commit"] == "unknown"
    assert time.monotonic() - started < 25  # the command itself would take 30


@dataclasses.dataclass
class Settings:
    """Settings as a dataclass."""

    lr: float


SAME: list[tuple[Any, Any]] = [
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({"x": (1, 2)}, {"x": [1, 2]}),
    ({"x": {"c", "d"}}, {"x": {"d", "c"}}),
    ({"f": test_run_ids_leave_random_streams_alone}, {"f": test_run_ids_leave_random_streams_alone}),
    ({"o": object()}, {"o": object()}),
]


@pytest.mark.req("000-34")
@pytest.mark.parametrize(("one", "other"), SAME)
def test_the_same_meaning_has_the_same_hash(one: Any, other: Any) -> None:
    """Order of keys, tuple or list, and an object's address make no difference."""
    assert config_hash(one) == config_hash(other)


def test_every_change_changes_the_hash() -> None:
    """Any other value or type, key or nesting gives another hash; 1, 1.0, "1" and True are four values."""
    values: list[Any] = [
        1, 1.0, "1", True, None, "None", float("nan"), "NaN", float("inf"), 0.0, -0.0, 0, False, "", [], {}, [[]],
        [1], [1, 1], {"1": 1}, {1: 1}, {True: 1}, ["list", 1], {"list": 1}, Path("a"), "a", torch.float32, "float32",
        torch.device("cpu"), torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([1]), Settings(1.0), Settings(2.0),
        {1}, 10**5000, 10**5000 + 1, int, float, b"a",
    ]  # fmt: skip
    hashes = [config_hash({"x": value}) for value in values]
    assert len(set(hashes)) == len(values)
    assert all(re.fullmatch(r"[0-9a-f]{64}", one) for one in hashes)


def test_the_hash_is_the_same_in_another_process() -> None:
    """Hashes can be compared between runs: the seed of string hashing does not matter."""
    code = "from hookline.record import config_hash; print(config_hash({'b': {'x', 'y', 'z'}, 'a': 1.5}))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, check=True
    )
    assert done.stdout.decode().strip() == config_hash({"a": 1.5, "b": {"z", "y", "x"}})


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names the software and the machine, and hides secrets of the command line."""
    monkeypatch.setattr(sys, "argv", ["train", "--token", "abc"])
    found = environment()
    assert found["torch"] == str(torch.__version__)
    assert found["argv"] == ["train", "--token", "<redacted>"]
    assert {"hookline", "python", "cuda", "platform", "cpu_count", "hostname"} <= set(found)


def test_a_run_is_described_before_it_begins() -> None:
    """Every field that run.json promises is there from the start, with no outcome yet."""
    record = Record.in_memory({"lr": 1}, 7)
    record.start([{"name": "slack", "params": {"webhook": "https://x"}}])
    assert list(record.run) == [
        "run_id", "started", "git", "config_hash", "environment", "seed", "hooks", "lineage", "attempts", "outcome",
    ]  # fmt: skip
    assert record.run["outcome"] is None
    assert record.run["hooks"] == [{"name": "slack", "params": {"webhook": "<redacted>"}}]
    assert set(record.run["attempts"][0]) == {"started", "pid", "host"}


def test_the_outcome_is_stored_for_the_run_and_the_attempt() -> None:
    """The attempt keeps its outcome, so that a resumed run does not erase it."""
    record = Record.in_memory()
    record.start([])
    record.close("failed", "token=abc was refused", [], [], {"steps": 3})
    run = record.run
    assert run["outcome"] == run["attempts"][-1]["outcome"] == "failed"
    assert run["reason"] == "token=<redacted> was refused"
    assert (run["lost"], run["counters"]) == (0, {"steps": 3})


def test_a_misspelt_outcome_raises() -> None:
    """The error names the nearest valid one."""
    with pytest.raises(RecordError, match="did you mean 'stopped'"):
        Record.in_memory().close("stoped", None, [], [], {})
