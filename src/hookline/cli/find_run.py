"""`latest`, or the first characters of a run's id, in place of a run's directory."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path

from hookline.errors import HooklineError

LATEST, RUNS = "latest", "runs"
_MOST_LISTED = 10  # runs in a message


def resolve_run(given: str) -> str:
    """Return the directory of the run that is named: a path that exists, or what is found in runs/ or in its DIR.

    ``latest`` and ``DIR/latest`` are the newest run; ``ID`` and ``DIR/ID`` the run whose id is or begins with ID. What
    names no run is returned as it is, because each command says what it expects.

    Raises:
        HooklineError: If there is no run for ``latest``, or several ids begin with ID.
    """
    path = Path(given)
    if os.path.exists(path) or not path.name:  # noqa: PTH110 - unlike Path's, it never raises
        return given
    directory = path.parent if len(path.parts) > 1 else Path(RUNS)
    runs = _runs_in(directory)
    if path.name == LATEST:
        found = [(when, str(run)) for run in runs if (when := _started(run / "run.json")) is not None]
        if not found:
            raise HooklineError(f"{given}: no run is in {directory}/; give a run's directory, or DIR/{LATEST}")
        return max(found)[1]
    names = [run.name for run in runs if run.name.startswith(path.name)]
    if path.name in names:
        names = [path.name]
    if len(names) > 1:
        more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
        listed = f"{', '.join(names[:_MOST_LISTED])}{more}"
        raise HooklineError(f"{given}: {len(names)} runs in {directory}/ begin with it: {listed}; give more of the id")
    return str(directory / names[0]) if names else given


def _runs_in(directory: Path) -> list[Path]:
    try:
        return sorted(run.parent for run in directory.glob("*/run.json"))
    except (OSError, ValueError):  # a name that is too long, or has a NUL in it
        return []


def _started(path: Path) -> datetime | None:
    """Return when a run was started; None if its run.json does not say."""
    try:
        return datetime.fromisoformat(json.loads(path.read_text(encoding="utf-8"))["started"]).astimezone()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
