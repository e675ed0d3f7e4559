"""`latest`, a run's name, or the first characters of its id, in place of a run's directory."""

from __future__ import annotations

import os
from pathlib import Path

from hookline.errors import HooklineError, RecordError
from hookline.record.labels import LATEST, read_labels
from hookline.record.runs import RUN, RunFiles

RUNS = "runs"
_MOST_LISTED = 10  # runs in a message


def resolve_run(given: str) -> str:
    """Return the directory of the run that is named: a path that exists, or what is found in runs/ or in its DIR.

    ``latest`` and ``DIR/latest`` are the newest run; otherwise ``TEXT`` and ``DIR/TEXT`` are, in this order, the run
    with this id, the run with this name, and the run whose id begins with it. What names no run is returned as it is,
    because each command says what it expects.

    Raises:
        HooklineError: If there is no run for ``latest``, or several runs have the name or the beginning of the id.
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
        return _only(named, given, f"in {directory}/ have this name", "an id")
    if len(path.parts) > 1 and (named := [run for run in _runs_in(Path(RUNS)) if _name_of(run) == given]):
        return _only(named, given, f"in {RUNS}/ have this name", "an id")
    begin = [run for run in runs if run.name.startswith(path.name)]
    return _only(begin, given, f"in {directory}/ begin with it", "more of the id") if begin else given


def _only(runs: list[Path], given: str, what: str, remedy: str) -> str:
    """Return the only run, or raise an error that lists all of them."""
    if len(runs) > 1:
        more = f" and {len(runs) - _MOST_LISTED} more" if len(runs) > _MOST_LISTED else ""
        listed = ", ".join(run.name for run in runs[:_MOST_LISTED])
        raise HooklineError(f"{given}: {len(runs)} runs {what}: {listed}{more}; give {remedy}")
    return str(runs[0])


def _runs_in(directory: Path) -> list[Path]:
    try:
        return sorted(run.parent for run in directory.glob(f"*/{RUN}"))
    except (OSError, ValueError):  # a name that is too long, or has a NUL in it
        return []


def _newest(runs: list[Path]) -> Path | None:
    """Return the run that was started last; None if no run.json says when."""
    found = []
    for path in runs:
        try:
            if (started := RunFiles.read(path).started) is not None:
                found.append((started, path))
        except RecordError:
            continue
    return max(found)[1] if found else None


def _name_of(run: Path) -> str | None:
    try:
        return read_labels(run).name
    except RecordError:
        return None
