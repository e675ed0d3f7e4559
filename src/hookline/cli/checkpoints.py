"""`hookline checkpoints` and `hookline verify-checkpoint`: verify every byte of a run's checkpoints, or of one."""

from __future__ import annotations

import argparse
from datetime import datetime
from pathlib import Path
from typing import Any

from hookline.checkpoints.store import MANIFEST, list_checkpoints, read_manifest, verify_checkpoint
from hookline.cli import FAILED
from hookline.cli.formatting import heading, open_console, paragraph
from hookline.errors import CheckpointError, HooklineError, written


def run(options: argparse.Namespace) -> int:
    """Verify and print every checkpoint of a run, newest first, or one; return 1 if one is damaged."""
    if options.command == "verify-checkpoint":
        found = [Path(options.path)]
        if not found[0].is_dir():
            raise HooklineError(f"{found[0]} is not a directory; give a checkpoint's, runs/<run_id>/checkpoints/step-…")
    else:
        from hookline.trainer.checkpointing import checkpoints_of

        found = list_checkpoints(checkpoints_of(Path(options.run)))
        if not found:
            is_run = (Path(options.run) / "run.json").exists()
            remedy = "the run has not saved one yet" if is_run else "give a run's directory, runs/<run_id>"
            raise HooklineError(f"no checkpoint in {options.run}; {remedy}")
    console, status = open_console(), 0
    for path in found:
        problems = verify_checkpoint(path)
        heading(console, path.name, "damaged" if problems else "good")
        for line in problems or [describe(path)]:
            paragraph(console, line)
        status = FAILED if problems else status
    return status


def describe(path: Path) -> str:
    """Return step, epoch, size and time of a good checkpoint."""
    try:
        manifest = read_manifest(path)
        saved = datetime.fromtimestamp((path / MANIFEST).stat().st_mtime).astimezone()
    except (CheckpointError, OSError) as error:  # another process may be deleting it
        return str(error)
    meta: dict[str, Any] = manifest["meta"]
    size = sum(file["bytes"] for file in manifest["files"].values())
    where = ", ".join(f"{name} {written(meta[name])}" for name in ("step", "epoch") if name in meta)
    return f"{where or 'no step'}, {size / 1e6:.1f} MB, saved {saved:%Y-%m-%d %H:%M:%S}"
