"""Test that a run knows where it came from, and that finding out never raises."""

import contextlib
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline.errors import RecordError
from hookline.record import Record


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


def started(root: Path, config: Any = None) -> dict[str, Any]:
    """Return what the record of a new run describes."""
    record = Record.on_disk(root / "runs", config=config or {}, seed=None)
    record.start([])
    return record.run


def git_state(directory: Path, tmp_path: Path) -> Any:
    """Return what a run that starts in a directory records about its code."""
    with contextlib.chdir(directory):
        return started(tmp_path)["git"]


def config_hash(config: Any) -> str:
    """Return the hash that a run with a config records."""
    record = Record.in_memory(config)
    record.start([])
    return str(record.run["config_hash"])


@pytest.mark.req("000-29")
def test_run_ids_are_unique_sortable_and_safe() -> None:
    """Two runs differ even in the same microsecond, a later one sorts later, and the id can name a file."""
    ids = [Record.in_memory().run_id for _ in range(1000)]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"\d{8}-\d{6}-[0-9a-z]{8}", one) for one in ids)
    assert [one[:20] for one in ids] == sorted(one[:20] for one in ids)


def test_run_ids_leave_random_streams_alone() -> None:
    """Making an id draws no number from training's generators."""
    before = torch.get_rng_state()
    Record.in_memory()
    assert torch.equal(before, torch.get_rng_state())


def test_git_state_of_a_clean_repository(repository: Path, tmp_path: Path) -> None:
    """A clean repository gives its commit and no difference; untracked files do not count."""
    (repository / "runs.txt").write_text("x")
    state = git_state(repository, tmp_path)
    assert state == {"commit": git(repository, "rev-parse", "HEAD"), "dirty": False, "diff_hash": None}


def test_git_state_of_a_changed_repository(repository: Path, tmp_path: Path) -> None:
    """A change makes it dirty, and another change gives another hash, staged or not."""
    (repository / "model.py").write_text("width = 2\n")
    first = git_state(repository, tmp_path)
    git(repository, "add", ".")
    staged = git_state(repository, tmp_path)
    (repository / "model.py").write_text("width = 3\n")
    second = git_state(repository, tmp_path)
    assert first["dirty"] is second["dirty"] is True
    assert first["diff_hash"] == staged["diff_hash"] != second["diff_hash"]


def test_git_state_without_a_commit(tmp_path: Path) -> None:
    """The state is unknown outside a repository and without commits."""
    unknown = {"commit": "unknown", "dirty": None, "diff_hash": None}
    git(tmp_path, "init", "-q", "empty")
    assert git_state(tmp_path / "empty", tmp_path) == unknown
    assert git_state(Path("/"), tmp_path) == unknown


def test_git_state_without_git(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without git is not an error."""
    monkeypatch.setenv("PATH", "")
    assert git_state(repository, tmp_path)["commit"] == "unknown"


def test_git_state_with_a_git_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A git that does not answer is abandoned after the time allowed for all its calls together."""
    slow = tmp_path / "git"
    slow.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(30)\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("hookline.record.provenance.GIT_TIMEOUT_S", 0.3)
    started = time.monotonic()
    assert git_state(tmp_path, tmp_path)["commit"] == "unknown"
    assert time.monotonic() - started < 25  # the command itself would take 30


@pytest.mark.req("000-34")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": {"x": 1, "y": [1]}}, {"a": {"y": [1], "x": 1}}),
        ({"x": (1, 2)}, {"x": [1, 2]}),
        ({"x": {"c", "d"}}, {"x": {"d", "c"}}),
        ({"f": print}, {"f": print}),
    ],
)
def test_the_same_meaning_has_the_same_hash(one: Any, other: Any) -> None:
    """Order of keys, and tuple or list make no difference."""
    assert config_hash(one) == config_hash(other)


def test_every_change_changes_the_hash() -> None:
    """Any other value or type, key or nesting gives another hash; 1, 1.0, "1" and True are four values."""
    values: list[Any] = [
        1, 1.0, "1", True, None, "None", float("nan"), "NaN", float("inf"), 0.0, -0.0, 0, False, "", [], {}, [[]],
        [1], [1, 1], {"1": 1}, {1: 1}, {True: 1}, ["list", 1], {"list": 1}, ["int", "x"], "a", "float32",
        torch.device("cpu"), 10**5000, 10**5000 + 1, hex(10**5000), int, float, b"a",
    ]  # fmt: skip
    hashes = [config_hash({"x": value}) for value in values]
    assert len(set(hashes)) == len(values)
    assert all(re.fullmatch(r"[0-9a-f]{64}", one) for one in hashes)


def test_the_hash_is_the_same_in_another_version_and_process() -> None:
    """Hashes can be compared between runs."""
    config = {"b": {"x", "y", "z"}, "a": 1.5, "n": {1: None, "t": [True, "ü", float("-inf"), -3]}}
    assert config_hash(config) == "0202fe0236573c74b978375c94c16e8121b3ac6365d1a1cbb905de90f753f26c"


def test_the_environment_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The software and the machine are named, and secrets of the command line hidden."""
    monkeypatch.setattr(sys, "argv", ["train", "--token", "abc"])
    found = started(tmp_path)["environment"]
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
