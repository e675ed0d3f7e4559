"""Find the run that `latest`, a name or the beginning or end of an id stand for, from what a command line says."""

from __future__ import annotations

import difflib
import os
import sys
from pathlib import Path

from hookline._console import print_line, printable
from hookline.errors import HooklineError, RecordError
from hookline.record.labels import LATEST, read_labels
from hookline.runs.find import RunFiles
from hookline.runs.reader import RUN

RUNS = "runs"
_MAX_LISTED = 10  # runs in a message


def resolve_run(given: str, *, must_exist: bool = True) -> str:
    """Return the directory of the run that is named: a path that exists, or what is found in runs/ or in its DIR.

    ``latest`` and ``DIR/latest`` are the newest run; otherwise ``TEXT`` and ``DIR/TEXT`` are, in this order, the run
    with this id, the newest run with this name, the run whose id begins with it, and the run whose id ends with it.

    Args:
        given: What a command line names.
        must_exist: Whether it can only be a run; otherwise what names no run is returned as it is.

    Raises:
        HooklineError: If there is no such run, or several runs have this beginning or end of an id.
    """
    path = Path(given)
    if os.path.exists(path) or not path.name:  # noqa: PTH110 - unlike Path's, it never raises
        return given
    directory = path.parent if len(path.parts) > 1 else Path(RUNS)
    runs = _runs_in(directory)
    if path.name == LATEST:
        newest = _newest(runs)
        if newest is None:
            raise HooklineError(f"{given}: no run is in {directory}/; give a run's directory, or DIR/{LATEST}")
        return str(newest)
    if directory / path.name in runs:
        return str(directory / path.name)
    if named := [run for run in runs if _name_of(run) == path.name]:
        return _newest_of(named, given)
    if len(path.parts) > 1 and (named := [run for run in _runs_in(Path(RUNS)) if _name_of(run) == given]):
        return _newest_of(named, given)
    where, matching = "begin", [run for run in runs if run.name.startswith(path.name)]
    if not matching:  # the ids of one day begin alike
        where, matching = "end", [run for run in runs if run.name.endswith(path.name)]
    if not matching and not must_exist:
        return given
    if not matching:
        raise HooklineError(_unknown_text(given, directory, runs))
    if len(matching) > 1:
        more = f" and {len(matching) - _MAX_LISTED} more" if len(matching) > _MAX_LISTED else ""
        listed = ", ".join(map(_described, matching[:_MAX_LISTED]))
        what = f"{len(matching)} runs in {directory}/ {where} with it: {listed}{more}"
        raise HooklineError(f"{given}: {what}; give more of the id")
    return str(matching[0])


def _newest_of(runs: list[Path], given: str) -> str:
    """Return the newest of the runs with a name; the one that is used is printed if there are several."""
    newest = _newest(runs) or runs[-1]
    if len(runs) > 1:
        text = f"{len(runs)} runs are named {given}; the newest, {newest.name}, is used"
        print_line(f"hookline: {printable(text)}", sys.stderr)
    return str(newest)


def _unknown_text(given: str, directory: Path, runs: list[Path]) -> str:
    """Return what is wrong with a name that no run has, with the nearest one."""
    if not runs:
        return f"{given}: no run is in {directory}/; give a run's directory"
    known = [name for run in runs for name in (run.name, _name_of(run)) if name]
    near = difflib.get_close_matches(Path(given).name, known, 1)
    question = f"did you mean {near[0]!r}? " if near else ""
    where = "" if directory == Path(RUNS) else f" {directory}"
    return f"{given}: no run in {directory}/ has this path, id or name; {question}`hookline runs{where}` lists them"


def _described(run: Path) -> str:
    """Return a run's id with its outcome and when it began."""
    try:
        record = RunFiles.read(run)
    except RecordError:
        return run.name
    started = "" if record.started is None else f", {record.started:%Y-%m-%d %H:%M}"
    return f"{run.name} ({record.outcome[:20]}{started})"


def _runs_in(directory: Path) -> list[Path]:
    try:
        return sorted(run.parent for run in directory.glob(f"*/{RUN}"))
    except (OSError, ValueError):  # a name that is too long, or has a NUL in it
        return []


def _newest(runs: list[Path]) -> Path | None:
    """Return the run that was started last; None if no run.json says when."""
    dated = []
    for path in runs:
        try:
            if (started := RunFiles.read(path).started) is not None:
                dated.append((started, path))
        except RecordError:
            continue
    return max(dated)[1] if dated else None


def _name_of(run: Path) -> str | None:
    try:
        return read_labels(run).name
    except RecordError:
        return None
