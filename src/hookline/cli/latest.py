"""`latest` in place of a run's directory: the run that was started last."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

from hookline.errors import HooklineError

LATEST, RUNS = "latest", "runs"


def resolve_latest(given: str) -> str:
    """Return the directory of the newest run for ``latest`` (in runs/) or ``DIR/latest``; other paths as they are."""
    path = Path(given)
    if path.name != LATEST or path.exists():
        return given
    directory = path.parent if len(path.parts) > 1 else Path(RUNS)
    started = {run.parent: _started(run) for run in directory.glob("*/run.json")}
    found = [(when, str(run)) for run, when in started.items() if when is not None]
    if not found:
        raise HooklineError(f"{given}: no run is in {directory}/; give a run's directory, or DIR/{LATEST}")
    return max(found)[1]


def _started(path: Path) -> datetime | None:
    """Return when a run was started; None if its run.json does not say."""
    try:
        return datetime.fromisoformat(json.loads(path.read_text(encoding="utf-8"))["started"]).astimezone()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
