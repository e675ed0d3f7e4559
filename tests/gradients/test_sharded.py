"""DTensor gradients: norms are the global ones, and every link is right or refuses by name."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("sharded_run.py")


def test_every_link_on_sharded_gradients_is_the_link_on_whole_ones(tmp_path: Path) -> None:
    """Two processes, gradients cut unevenly along their first dimension, against one whole."""
    environment = {**os.environ, "PYTHONPATH": ":".join([str(SCRIPT.parent), *sys.path])}
    command = [sys.executable, str(SCRIPT), str(tmp_path / "store")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert all(done.stdout.count(f"all the same on rank {rank}") == 1 for rank in range(2))
