"""Read the fields of run.json with the types that `hookline show` and the report expect: the file may be edited."""

from __future__ import annotations

from typing import Any

from hookline.record.json_lines import as_mapping, mappings_in
from hookline.runs.summary import RunSummary


def run_fields(summary: RunSummary) -> dict[str, Any]:
    """Return the fields of run.json; lists have no entries, and mappings no keys, where the file has something else."""
    run = summary.run
    mappings = {name: as_mapping(run.get(name)) for name in ("counters", "environment", "git")}
    attempts = mappings_in(run.get("attempts"))
    return {**run, **mappings, "attempts": attempts, "hooks": summary.hooks, "costs": summary.costs}
