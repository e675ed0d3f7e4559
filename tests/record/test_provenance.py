"""Test that a run knows where it came from, and that finding out never raises."""

import contextlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from records import start_record

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
    record = start_record(root / "runs", config=config)
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
    assert all(re.fullmatch(r"\d{8}-\d{6}-[0-9a-z]{8}", run_id) for run_id in ids)
    assert [run_id[:20] for run_id in ids] == sorted(run_id[:20] for run_id in ids)


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
    slow.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(3600)\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("hookline.record.provenance.GIT_TIMEOUT_S", 0.3)
    assert git_state(tmp_path, tmp_path)["commit"] == "unknown"


def make_hostile(repository: Path, ran: Path) -> None:
    """Configure every program that git may run for a comparison; each leaves a file with its name."""

    def program(name: str) -> str:
        script = ran.parent / f"program-{name}"
        script.write_text(f'#!/bin/sh\ntouch "{ran}/{name}"\n')
        script.chmod(0o755)
        return str(script)

    ran.mkdir(exist_ok=True)
    names = {
        "filter.plain.clean": "clean", "filter.long.process": "process", "filter.we i rd.clean": "odd name",
        "core.fsmonitor": "fsmonitor", "diff.own.command": "diff driver", "diff.text.textconv": "textconv",
        "diff.external": "external diff", "core.pager": "pager", "pager.diff": "pager of diff",
        "core.sshCommand": "ssh", "credential.helper": "credential", "core.askPass": "askpass",
    }  # fmt: skip
    for key, name in names.items():
        git(repository, "config", key, program(name))
    git(repository, "config", "filter.plain.required", "true")
    included = ran.parent / "included"
    included.write_text(f'[filter "included"]\n\tclean = {program("included")}\n')
    git(repository, "config", f"includeIf.gitdir:{repository}/.path", str(included))
    attributes = [
        "a filter=plain",
        "b filter=long",
        "c filter=we\\ i\\ rd",
        "d filter=included",
        "e diff=own",
        "f diff=text",
    ]
    (repository / ".git" / "info").mkdir(exist_ok=True)
    (repository / ".git" / "info" / "attributes").write_text("\n".join(attributes))
    hooks = repository / ".git" / "hooks"
    hooks.mkdir(exist_ok=True)
    for hook in ("post-index-change", "reference-transaction", "fsmonitor-watchman", "pre-auto-gc"):
        Path(program(hook)).rename(hooks / hook)
    for name in "abcdef":
        (repository / name).write_text(f"changed {name}\n")


@pytest.fixture
def hostile(repository: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Return a repository with a submodule, both full of programs, and the folder in which those leave files."""
    for name in "abcdef":
        (repository / name).write_text(f"{name}\n")
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "second")
    git(repository, "clone", "-q", str(repository), "sub")
    git(repository, "add", "sub")
    git(repository, "commit", "-q", "-m", "third")
    ran = tmp_path / "ran"
    make_hostile(repository / "sub", ran)
    git(repository / "sub", "config", "filter.inner.clean", f"touch {ran}/inner")  # not in the config outside
    (repository / "sub" / ".git" / "info" / "attributes").write_text("a filter=inner\n")
    (repository / "sub" / "a").write_text("A\n")  # as long as before, so that its contents are compared
    make_hostile(repository, ran)
    return repository, ran


def test_git_runs_no_program_of_the_repository(hostile: tuple[Path, Path], tmp_path: Path) -> None:
    """Neither filters nor a monitor, drivers, hooks, pagers or a submodule's git run, and changes are found."""
    repository, ran = hostile
    state = git_state(repository, tmp_path)
    assert state["dirty"] is True and len(state["diff_hash"]) == 64
    assert sorted(path.name for path in ran.iterdir()) == []
    (repository / "folder").mkdir()
    git_state(repository / "folder", tmp_path)  # the repository is above the current directory
    assert sorted(path.name for path in ran.iterdir()) == []
    with contextlib.suppress(subprocess.CalledProcessError):
        git(repository, "diff", "HEAD")  # the control
    assert {"fsmonitor", "clean"} & {path.name for path in ran.iterdir()}


def test_git_fetches_nothing(hostile: tuple[Path, Path], tmp_path: Path) -> None:
    """A partial clone fetches objects that it lacks through a program that its config names."""
    repository, ran = hostile
    for key, value in {
        "core.repositoryFormatVersion": "1", "extensions.partialClone": "origin", "remote.origin.promisor": "true",
        "remote.origin.url": "ssh://nowhere.example.org/x",
    }.items():  # fmt: skip
        git(repository, "config", key, value)
    blob = git(repository, "rev-parse", "HEAD:e")
    (repository / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    state = git_state(repository, tmp_path)
    assert (len(state["commit"]), state["dirty"]) == (40, None)
    assert sorted(path.name for path in ran.iterdir()) == []
    with contextlib.suppress(subprocess.CalledProcessError):
        git(repository, "-c", "core.fsmonitor=", "diff", "HEAD", "--", "e")  # the control
    assert "ssh" in {path.name for path in ran.iterdir()}


def test_a_filter_whose_name_git_cannot_override(hostile: tuple[Path, Path], tmp_path: Path) -> None:
    """The difference is unknown then, because looking for it would run the filter."""
    repository, ran = hostile
    git(repository, "config", "filter.a=b.clean", f"touch {ran}/name")
    (repository / ".git" / "info" / "attributes").write_text("a filter=a=b\n")
    state = git_state(repository, tmp_path)
    assert (len(state["commit"]), state["dirty"]) == (40, None)
    assert sorted(path.name for path in ran.iterdir()) == []


def test_a_repository_of_another_user_is_not_asked(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Git refuses it unless the user's `safe.directory` lists it, and Hookline does not insist."""
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert git_state(repository, tmp_path)["commit"] == "unknown"


def test_a_bare_repository_in_a_folder_is_not_asked(repository: Path, tmp_path: Path) -> None:
    """A folder with the files of a bare repository, as an archive may contain one, is not a repository."""
    git(tmp_path, "clone", "-q", "--bare", str(repository), "data")
    assert git_state(tmp_path / "data", tmp_path)["commit"] == "unknown"


@pytest.mark.req("000-34")
@pytest.mark.parametrize(
    ("given", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": {"x": 1, "y": [1]}}, {"a": {"y": [1], "x": 1}}),
        ({"x": (1, 2)}, {"x": [1, 2]}),
        ({"x": {"c", "d"}}, {"x": {"d", "c"}}),
        ({"f": print}, {"f": print}),
    ],
)
def test_the_same_meaning_has_the_same_hash(given: Any, other: Any) -> None:
    """Order of keys, and tuple or list make no difference."""
    assert config_hash(given) == config_hash(other)


@pytest.mark.req("000-33")
def test_every_change_changes_the_hash() -> None:
    """Any other value, type, key, order or nesting gives another hash; 1, 1.0, "1" and True are four values."""
    values: list[Any] = [
        1, 1.0, "1", True, None, "None", float("nan"), "NaN", float("inf"), 0.0, -0.0, 0, False, "", [], {}, [[]],
        [1], [1, 1], [1, 2], [2, 1], {"1": 1}, {1: 1}, {True: 1}, ["list", 1], {"list": 1}, ["int", "x"], "a",
        "float32", torch.device("cpu"), 10**5000, 10**5000 + 1, hex(10**5000), int, float, b"a",
    ]  # fmt: skip
    hashes = [config_hash({"x": value}) for value in values]
    assert len(set(hashes)) == len(values)
    assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in hashes)


def test_the_hash_is_the_same_in_another_version_and_process() -> None:
    """Hashes can be compared between runs."""
    config = {"b": {"x", "y", "z"}, "a": 1.5, "n": {1: None, "t": [True, "ü", float("-inf"), -3]}}
    assert config_hash(config) == "0202fe0236573c74b978375c94c16e8121b3ac6365d1a1cbb905de90f753f26c"


def test_the_environment_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The software and the machine are named, and secrets of the command line hidden."""
    monkeypatch.setattr(sys, "argv", ["train", "--token", "abc"])
    environment = started(tmp_path)["environment"]
    assert environment["torch"] == str(torch.__version__)
    assert environment["argv"] == ["train", "--token", "<redacted>"]
    assert {"hookline", "python", "cuda", "platform", "cpu_count", "hostname"} <= set(environment)


def test_a_run_is_described_before_it_begins() -> None:
    """Every field that run.json promises is there from the start, with no outcome yet."""
    record = Record.in_memory({"lr": 1}, 7)
    record.start([{"name": "slack", "params": {"webhook": "https://x"}}])
    assert list(record.run) == [
        "format", "run_id", "started", "git", "config_hash", "environment", "seed", "hooks", "optimizers",
        "lineage", "attempts", "outcome",
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
