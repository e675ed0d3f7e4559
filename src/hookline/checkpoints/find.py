"""Find the checkpoint that a path means: a checkpoint itself, a run, or a directory that holds checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from hookline._console import logger
from hookline._fs import explain, refuse_link
from hookline.checkpoints.store import SavedCheckpoint, has_checkpoints, is_checkpoint, newest_good
from hookline.errors import CheckpointError
from hookline.record.format import EVENTS_FILE, RUN_FILE
from hookline.record.json_lines import read_jsonl


class Found(NamedTuple):
    """The checkpoint that a path means, and the problems of newer ones, which are damaged."""

    checkpoint: SavedCheckpoint
    problems: list[str]

    @property
    def lineage(self) -> dict[str, Any]:
        """Run, step and path, for a new run that starts from there."""
        path, meta = self.checkpoint.path, self.checkpoint.manifest["meta"]
        return {"run_id": meta.get("run_id"), "step": meta.get("step"), "checkpoint": str(path.absolute())}


def find_checkpoint(path: Path) -> Found:
    """Return the checkpoint that a path means: the newest whole one of several."""
    if os.path.lexists(path / "manifest.json"):
        return Found(SavedCheckpoint(path), [])
    directory = checkpoints_of(path)
    newest, problems = newest_good(directory)
    problems = [*_missing(directory, newest), *problems]
    for problem in problems:
        logger.warning("skipped a damaged checkpoint: %s", problem)
    if newest is None:
        if problems:
            raise CheckpointError(f"{directory} has no undamaged checkpoint ({len(problems)} damaged)")
        if not os.path.lexists(path) and not has_no_checkpoint_yet(path.parent):
            raise CheckpointError(f"{path} does not exist; pass the path of a run or of a checkpoint")
        if path.is_file():
            what = f"{path} is a file, but a checkpoint is a directory"
            raise CheckpointError(f"{what}; load files from torch.save with model.load_state_dict(torch.load(…))")
        raise CheckpointError(f"{directory} has no checkpoint; the hook `checkpoint` saves them")
    return Found(newest, problems)


def has_no_checkpoint_yet(source: Path | Found) -> bool:
    """Return whether a path is a run that has not written a checkpoint; damaged and missing ones count as written."""
    if isinstance(source, Found) or not os.path.lexists(source / RUN_FILE):
        return False
    directory = source / "checkpoints"
    return not has_checkpoints(directory) and _newest_recorded(directory) is None


def _missing(directory: Path, newest: SavedCheckpoint | None) -> list[str]:
    """Return a sentence about the newest checkpoint that the record names, if it is newer than `newest` and gone.

    Retention never deletes the newest one, so another program must have done it.
    """
    recorded = _newest_recorded(directory)
    if recorded is None:
        return []
    step, path = recorded
    at = -1 if newest is None else newest.manifest["meta"].get("step")
    if is_checkpoint(path) or not isinstance(at, int) or at >= step:
        return []
    what = "is a link" if path.is_symlink() else "is empty" if path.is_dir() else "is missing"
    return [f"{path}: {what}, although the run saved it"]


def _newest_recorded(directory: Path) -> tuple[int, Path] | None:
    """Return step and path of the newest checkpoint that was saved according to events.jsonl, if any."""
    newest: tuple[int, Path] | None = None
    events = directory.parent / EVENTS_FILE
    for event in read_jsonl(events)[0] if directory.name == "checkpoints" and events.is_file() else []:
        kind, step, path = event.get("kind"), event.get("step"), event.get("path")
        if not isinstance(step, int) or not isinstance(path, str):
            continue
        if kind == "checkpoint_saved" and Path(path).parent.name == directory.name:
            newest = step, directory / Path(path).name  # the run may have been moved since
        elif kind == "checkpoint_loaded" and newest is not None and newest[0] > step:  # it was moved aside in that case
            newest = None
    return newest


def checkpoints_of(path: Path) -> Path:
    """Return the directory that holds a run's checkpoints, or the given one itself. Raises an error for a link."""
    inside = path / "checkpoints"
    try:
        refuse_link(inside)
    except OSError as error:
        raise CheckpointError(explain(inside, error, "read")) from error
    return inside if inside.is_dir() else path


def run_directory(path: Path) -> Path | None:
    """Return the run that a path to resume from belongs to; None for a checkpoint outside of a run.

    The run's id is the name of its directory, regardless of the name of a link to it.
    """
    places = (path, *path.absolute().parents[:2])
    return next((place.resolve() for place in places if os.path.lexists(place / RUN_FILE)), None)
