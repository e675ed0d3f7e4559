"""A run that is killed with SIGKILL at any point, also during a save, resumes to exactly the same result."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("killed_run.py")


def killed_run(root: Path, kills: int, seed: int, *how: str) -> dict[str, Any]:
    """Train once without interruption and once with that many kills; `how` may be async_save for the latter."""
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(root), str(kills), str(seed), *how]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(result: dict[str, Any], kills: int) -> None:
    """Check that there were that many kills, some of them during a save, and that the results are equal."""
    assert [line for line in result["story"] if "killed" not in line] == ["done"]
    assert len(result["story"]) == kills + 1
    assert "killed in a save" in result["story"]
    assert len(result["whole"]["curve"]) == 36
    assert result["parts"] == result["whole"]


@pytest.mark.req("002-68", "002-67")
def test_killed_four_times(tmp_path: Path) -> None:
    """With all built-in hooks, the curve and the hash of parameters and optimizer state are the same."""
    check(killed_run(tmp_path, 4, seed=1), 4)


def test_killed_while_saving_in_the_background(tmp_path: Path) -> None:
    """With async_save, a kill finds training some steps ahead of the save; the result is still the same."""
    check(killed_run(tmp_path, 4, 2, "async_save"), 4)


@pytest.mark.soak
@pytest.mark.parametrize("how", [[], ["async_save"]], ids=["waiting", "async_save"])
@pytest.mark.parametrize("seed", range(3))
def test_killed_twenty_times(seed: int, how: list[str], tmp_path: Path) -> None:
    """The same holds for 20 kills at random times."""
    check(killed_run(tmp_path, 20, seed, *how), 20)
