"""`hookline checkpoints` and `hookline verify-checkpoint`: which checkpoints are good, and which are damaged."""

from pathlib import Path

import pytest
import torch
from commands import Captured, error_of, output_of

from hookline.checkpoints.store import write_checkpoint
from hookline.cli import main


@pytest.fixture
def run() -> Path:
    """Write a run's directory with two checkpoints."""
    for step in (3, 12):
        write_checkpoint(
            Path("run/checkpoints"), f"step-{step}", {"model": {"w": torch.ones(300_000)}}, {"step": step, "epoch": 1}
        )
    return Path("run")


@pytest.mark.parametrize("given", ["run", "run/checkpoints"])
def test_checkpoints_are_listed_newest_first(given: str, run: Path, capsys: Captured) -> None:
    """Each checkpoint is listed with its step, epoch, size and time, and whether it is good."""
    lines = output_of(capsys, ["checkpoints", given]).splitlines()
    assert [line.split() for line in lines[::2]] == [["step-12", "good"], ["step-3", "good"]]
    assert lines[1].startswith("    step 12, epoch 1, 1.2 MB, saved 20")


def test_a_damaged_checkpoint_is_described(run: Path, capsys: Captured) -> None:
    """A damaged checkpoint is printed with what is wrong, and the exit status is 1."""
    file = run / "checkpoints" / "step-12" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    out = output_of(capsys, ["checkpoints", "run"], 1)
    assert "step-12  damaged\n    model.safetensors: has 1200079 bytes instead of 1200080" in out
    assert "step-3  good" in out


def test_a_directory_without_checkpoints_is_an_error(capsys: Captured) -> None:
    """The message for an empty or missing directory says what to give instead."""
    assert "nowhere: no run is in runs/; pass a run's directory" in error_of(capsys, ["checkpoints", "nowhere"])
    Path("empty").mkdir()
    assert "no checkpoint in empty; pass a run's directory" in error_of(capsys, ["checkpoints", "empty"])


def test_one_checkpoint_is_verified(run: Path, capsys: Captured) -> None:
    """The exit status is 0 for a good checkpoint and 1 for a damaged one."""
    path = run / "checkpoints" / "step-3"
    assert "step-3  good" in output_of(capsys, ["verify-checkpoint", str(path)])
    (path / "state.json").write_text("{}")
    assert "state.json: has 2 bytes instead of" in output_of(capsys, ["verify-checkpoint", str(path)], 1)
    assert main(["verify-checkpoint", "nowhere"]) == 2
    assert "error: nowhere: no run is in runs/; pass a run's directory" in capsys.readouterr().err


def test_a_run_is_no_damaged_checkpoint(run: Path, capsys: Captured) -> None:
    """The message names the command for all checkpoints of a run, and the newest one."""
    (run / "run.json").write_text("{}")
    error = error_of(capsys, ["verify-checkpoint", "run"])
    assert "run is a run; `hookline checkpoints run` verifies all" in error and "run/last" in error


def test_a_checkpoint_cannot_control_the_terminal(run: Path, capsys: Captured) -> None:
    """Control characters in its meta, its file names and its own name are printed as escapes."""
    escape = "\x1b[31m\x07\u202e"
    hostile = {"step": escape, "epoch": {escape: [escape]}}
    path = write_checkpoint(run / "checkpoints", "step-99", {"model": {}}, hostile)
    damaged = run / "checkpoints" / "step-3"
    (damaged / f"file{escape}").write_text("")
    named = path.rename(run / f"name{escape}")
    assert main(["verify-checkpoint", str(named)]) == 0
    named.rename(path)
    assert main(["checkpoints", str(run)]) == 1
    assert main(["verify-checkpoint", f"nowhere{escape}"]) == 2
    out, err = capsys.readouterr()
    assert (out + err).replace("\n", "").isprintable()
    assert "name\\x1b[31m\\x07\\u202e  good" in out and "file\\x1b[31m\\x07\\u202e: is not in the manifest" in out
