"""Write a record as a run does, without training."""

from pathlib import Path
from typing import Any

from hookline.record import Record


def start_record(
    root: Path | str = "runs", run_id: str | None = None, config: Any = None, seed: int | None = None, **more: Any
) -> Record:
    """Make a record on disk as a run has it after its first step; `more` are options of `Record.start`."""
    record = Record.on_disk(root, config=config or {}, seed=seed, run_id=run_id)
    record.start([], **more)
    record.commit()
    return record


def close_record(record: Record, outcome: str = "completed", reason: str | None = None, **counters: int) -> Path:
    """Close a record and return its directory."""
    record.close(outcome, reason, [], [], counters)
    return record.path
