"""Find the run that `latest`, a name or a part of an id stands for, and the checkpoint that `best` or `last` means."""

from __future__ import annotations

import difflib
import os
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from hookline._console import print_line, printable
from hookline._text import first_of
from hookline.errors import RecordError
from hookline.record.format import RUN_FILE
from hookline.record.json_lines import directory_of
from hookline.record.labels import LATEST
from hookline.runs.find import RunFiles

RUNS = "runs"
BEST, LAST = "best", "last"
_MAX_LISTED = 10  # runs in a message


def find_run(given: Path | str | None, runs: Path | str = RUNS) -> Path:
    """Return the directory that is named, as `find_files` finds it."""
    return find_files(given, runs).path


def find_files(
    given: Path | str | None, runs: Path | str = RUNS, known: dict[Path, RunFiles] | None = None
) -> RunFiles:
    """Return the files of the named run: a path that exists, a run in `runs` or in its DIR, or a run's checkpoint.

    ``latest`` and ``DIR/latest`` are the newest run; otherwise ``TEXT`` and ``DIR/TEXT`` are, in this order, the run
    with this id, the newest run with this name, the run whose id begins with it, and the run whose id ends with it.
    For a run that is named like this, ``RUN/best`` is the best checkpoint, ``RUN/last`` the newest whole one, and
    ``RUN/step-00000120`` the one with this name.

    Args:
        given: The name on a command line or in a script.
        runs: Where runs are whose directory is not given.
        known: The files of runs that were looked at before, so that they are not read again; more are added.

    Raises:
        RecordError: If there is no such run, or several runs have this beginning or end of an id.
    """
    path, known = directory_of(given), {} if known is None else known
    if os.path.exists(path) or not path.name:  # noqa: PTH110 - unlike Path's, it never raises
        return known.setdefault(path, RunFiles(path))
    is_inside = len(path.parts) > 1
    if is_inside and os.path.lexists(path.parent / RUN_FILE):
        return RunFiles(_find_checkpoint(path, path.parent))
    try:
        return _find_run(str(given), path, Path(runs), known)
    except RecordError:
        run = _run_of(path, runs, known) if is_inside else None
        if run is None:
            raise
        return RunFiles(_find_checkpoint(path, run))


def _run_of(path: Path, runs: Path | str, known: dict[Path, RunFiles]) -> Path | None:
    """Return the run that the parts of a path before the last one name; None if they are not a run."""
    try:
        run = find_files(path.parent, runs, known).path
    except RecordError:
        if path.name in (BEST, LAST) and not path.parent.is_dir():  # then the name of the run is what is wrong
            raise
        return None
    return run if os.path.lexists(run / RUN_FILE) else None


def _find_checkpoint(path: Path, run: Path) -> Path:
    """Return the checkpoint of a run that the last part of a path names.

    The newest whole one is found, and all are verified, when the directory of all is read.
    """
    checkpoints = run / "checkpoints"
    if path.name == LAST:
        return checkpoints
    named = checkpoints / path.name
    if os.path.exists(named):  # noqa: PTH110
        return named.with_name(named.resolve().name)  # what the link to the best one leads to now
    if path.name == BEST:
        why = "has no best checkpoint: no checkpoint hook with a `monitor` has saved one"
        raise RecordError(f"{path}: {run} {why}; {path.parent}/{LAST} is the newest")
    saved = sorted(checkpoint.name for checkpoint in checkpoints.glob("[!.]*"))
    listed = ", ".join(saved[-_MAX_LISTED:]) or "none"
    raise RecordError(f"{path}: {run} has no checkpoint {path.name!r}; it has {listed}")


def _find_run(given: str, path: Path, root: Path, known: dict[Path, RunFiles]) -> RunFiles:
    directory = path.parent if len(path.parts) > 1 else root
    runs = _runs_in(directory, known)
    if path.name == LATEST:
        newest = _newest(runs)
        if newest is None:
            raise RecordError(f"{given}: no run is in {directory}/; pass a run's directory, or DIR/{LATEST}")
        return newest
    if same := [run for run in runs if run.path == directory / path.name]:
        return same[0]
    if named := [run for run in runs if run.labels.name == path.name]:
        return _newest_of(named, given)
    if len(path.parts) > 1 and (named := [run for run in _runs_in(root, known) if run.labels.name == given]):
        return _newest_of(named, given)
    where, matching = "begin", [run for run in runs if run.path.name.startswith(path.name)]
    if not matching:  # the ids of one day begin with the same characters
        where, matching = "end", [run for run in runs if run.path.name.endswith(path.name)]
    if not matching:
        raise RecordError(_unknown_text(given, directory, runs))
    if len(matching) > 1:
        what = f"{len(matching)} runs in {directory}/ {where} with it"
        listed = first_of([*map(_described, matching)], _MAX_LISTED)
        raise RecordError(f"{given}: {what}: {listed}; pass more of the id")
    return matching[0]


def _newest_of(runs: list[RunFiles], given: str) -> RunFiles:
    """Return the newest of the runs with a name; the one that is used is printed if there are several."""
    newest = _newest(runs) or runs[-1]
    if len(runs) > 1:
        text = f"{len(runs)} runs are named {given}; the newest, {newest.path.name}, is used"
        print_line(f"hookline: {printable(text)}", sys.stderr)
    return newest


def _unknown_text(given: str, directory: Path, runs: list[RunFiles]) -> str:
    """Return what is wrong with a name that no run has, with the nearest one."""
    if not runs:
        return f"{given}: no run is in {str(directory).rstrip('/')}/; pass a run's directory"
    known = [name for run in runs for name in (run.path.name, run.labels.name) if name]
    near = difflib.get_close_matches(Path(given).name, known, 1)
    question = f"did you mean {near[0]!r}? " if near else ""
    where = "" if directory == Path(RUNS) else f" {directory}"
    return f"{given}: no run in {directory}/ has this path, id or name; {question}`hookline runs{where}` lists them"


def _described(run: RunFiles) -> str:
    """Return a run's id with its outcome and when it began."""
    try:
        started = "" if run.started is None else f", {run.started:%Y-%m-%d %H:%M}"
        return f"{run.path.name} ({run.outcome[:20]}{started})"
    except RecordError:
        return run.path.name


def _runs_in(directory: Path, known: dict[Path, RunFiles]) -> list[RunFiles]:
    try:
        paths = [file.parent for file in sorted(directory.glob(f"*/{RUN_FILE}"))]
    except (OSError, ValueError):  # a name that is too long, or has a NUL in it
        return []
    return [known.setdefault(path, RunFiles(path)) for path in paths]


def _newest(runs: list[RunFiles]) -> RunFiles | None:
    """Return the run that was started last; None if no run.json says when."""
    dated: dict[tuple[datetime, Path], RunFiles] = {}
    for run in runs:
        with suppress(RecordError):
            if run.started is not None:
                dated[run.started, run.path] = run
    return dated[max(dated)] if dated else None
