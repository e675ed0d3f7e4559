"""Checkpoints of a future that will not be: a run went on from an earlier point than it had reached."""

from __future__ import annotations

from pathlib import Path

from hookline.checkpoints.disk import make_directory, rename_to_free_name, sync_directory
from hookline.checkpoints.files import age_key, list_checkpoints

ABANDONED = "abandoned"


def set_aside_later(directory: Path, step: int) -> list[str]:
    """Move the checkpoints of later steps into ``abandoned/`` beside them, where no resume finds them unasked.

    Nothing is deleted. Left where they are, the newest checkpoint would be one that this run never came from.
    """
    later = [path for path in list_checkpoints(directory) if age_key(path)[0] > step]
    if not later:
        return []
    aside = directory.parent / ABANDONED
    make_directory(aside)
    moved = [str(rename_to_free_name(path, aside / path.name)) for path in later]
    sync_directory(aside)
    sync_directory(directory)
    return moved
