"""Read the fields of run.json with the types that `hookline show` and the report expect: the file may be edited."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookline.record.json_lines import as_mapping, mappings_in
from hookline.record.runs import RunFiles
from hookline.record.summary import RunSummary


def run_fields(summary: RunSummary) -> dict[str, Any]:
    """Return the fields of run.json; lists have no entries, and mappings no keys, where the file has something else."""
    run = summary.run
    mappings = {name: as_mapping(run.get(name)) for name in ("counters", "environment", "git")}
    attempts = mappings_in(run.get("attempts"))
    return {**run, **mappings, "attempts": attempts, "hooks": summary.hooks, "costs": summary.costs}


def last_attempt_seconds(path: Path, run: Mapping[str, Any]) -> float | None:
    """Return the duration of the last attempt, which the costs of hooks are about; None if it is not known.

    Args:
        path: The run's directory.
        run: The fields of run.json.
    """
    attempts = run.get("attempts")
    return RunFiles(path, {**run, "attempts": attempts[-1:] if isinstance(attempts, list) else []}).seconds
