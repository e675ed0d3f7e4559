"""Test update hooks on DTensors: norms are global, and each hook is right or raises."""

from pathlib import Path

from commands import python

SCRIPT = Path(__file__).with_name("sharded_run.py")


def test_every_hook_on_sharded_gradients_equals_that_on_whole_ones(tmp_path: Path) -> None:
    """Gradients sharded unevenly over two processes give what whole gradients give."""
    done = python(SCRIPT, tmp_path / "store", check=True)
    assert all(done.stdout.count(f"all the same on rank {rank}") == 1 for rank in range(2))
