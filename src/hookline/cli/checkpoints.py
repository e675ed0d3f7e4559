"""`hookline checkpoints`: those of a run, newest first, each verified."""

from __future__ import annotations

import argparse
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from hookline.checkpoints.files import list_checkpoints, verify_checkpoint
from hookline.checkpoints.manifest import MANIFEST, read_manifest
from hookline.cli import FAILED
from hookline.cli.page import entry, heading, open_page
from hookline.errors import CheckpointError, HooklineError


def run(options: argparse.Namespace) -> int:
    """Print every checkpoint with what is wrong with it; 1 when one is damaged."""
    from hookline.trainer.checkpointing import holder_of

    holder = holder_of(Path(options.run))
    found = list_checkpoints(holder)
    if not found:
        raise HooklineError(f"no checkpoint in {holder}; give a run's directory, runs/<run_id>")
    console = open_page()
    return max([print_checkpoint(console, path) for path in found])


def print_checkpoint(console: Console, path: Path) -> int:
    """One checkpoint: its name, whether it is whole, and when which step was saved. 1 when it is damaged."""
    problems = verify_checkpoint(path)
    heading(console, path.name, "damaged" if problems else "good")
    for line in problems or [describe(path)]:
        entry(console, line)
    return FAILED if problems else 0


def describe(path: Path) -> str:
    """Step, epoch, size and time of a checkpoint that is whole."""
    try:
        manifest = read_manifest(path)
        saved = datetime.fromtimestamp((path / MANIFEST).stat().st_mtime).astimezone()
    except (CheckpointError, OSError) as error:  # somebody removes it at this moment
        return str(error)
    meta: dict[str, Any] = manifest["meta"]
    size = sum(file["bytes"] for file in manifest["files"].values())
    where = ", ".join(f"{name} {meta[name]}" for name in ("step", "epoch") if name in meta)
    return f"{where or 'no step'}, {size / 1e6:.1f} MB, saved {saved:%Y-%m-%d %H:%M:%S}"
