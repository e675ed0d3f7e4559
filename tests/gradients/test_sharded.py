"""Test update hooks on DTensors: norms are global, and each hook is right or raises."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("sharded_run.py")


def test_every_hook_on_sharded_gradients_equals_that_on_whole_ones(tmp_path: Path) -> None:
    """Gradients sharded unevenly over two processes give what whole gradients give."""
    environment = {**os.environ, "PYTHONPATH": ":".join([str(SCRIPT.parent), *sys.path])}
    command = [sys.executable, str(SCRIPT), str(tmp_path / "store")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(done.stdout.count(f"all the same on rank {rank}") == 1 for rank in range(2))
