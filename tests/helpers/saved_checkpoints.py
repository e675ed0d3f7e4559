"""What tests ask of the checkpoints on disk."""

from pathlib import Path

from hookline.checkpoints.store import SavedCheckpoint, checkpoints_in


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the paths of the checkpoints in a directory, newest first."""
    return [checkpoint.path for checkpoint in checkpoints_in(directory)]


def verify_checkpoint(path: Path) -> list[str]:
    """Return the problems of a checkpoint; empty if every file is as it was written."""
    return SavedCheckpoint(path).problems
