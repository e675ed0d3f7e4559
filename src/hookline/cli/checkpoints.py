"""`hookline checkpoints` and `hookline verify-checkpoint`: verify every byte of a run's checkpoints, or of one."""

from __future__ import annotations

import argparse
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from hookline.checkpoints.store import MANIFEST, list_checkpoints, read_manifest, verify_checkpoint
from hookline.cli import FAILED
from hookline.cli.formatting import heading, open_console, paragraph
from hookline.errors import CheckpointError, HooklineError


def run(options: argparse.Namespace) -> int:
    """Verify and print every checkpoint of a run, newest first, or one; return 1 if one is damaged."""
    if options.command == "verify-checkpoint":
        path = Path(options.path)
        if not path.is_dir():
            raise HooklineError(f"{path} is not a directory; give a checkpoint's, runs/<run_id>/checkpoints/step-…")
        return print_checkpoint(open_console(), path)
    from hookline.trainer.checkpointing import holder_of

    holder = holder_of(Path(options.run))
    found = list_checkpoints(holder)
    if not found:
        raise HooklineError(f"no checkpoint in {holder}; give a run's directory, runs/<run_id>")
    console = open_console()
    return max([print_checkpoint(console, path) for path in found])


def print_checkpoint(console: Console, path: Path) -> int:
    """Print a checkpoint's name, and what is in it or what is wrong with it; return 1 if it is damaged."""
    problems = verify_checkpoint(path)
    heading(console, path.name, "damaged" if problems else "good")
    for line in problems or [describe(path)]:
        paragraph(console, line)
    return FAILED if problems else 0


def describe(path: Path) -> str:
    """Return step, epoch, size and time of a good checkpoint."""
    try:
        manifest = read_manifest(path)
        saved = datetime.fromtimestamp((path / MANIFEST).stat().st_mtime).astimezone()
    except (CheckpointError, OSError) as error:  # another process may be deleting it
        return str(error)
    meta: dict[str, Any] = manifest["meta"]
    size = sum(file["bytes"] for file in manifest["files"].values())
    where = ", ".join(f"{name} {meta[name]}" for name in ("step", "epoch") if name in meta)
    return f"{where or 'no step'}, {size / 1e6:.1f} MB, saved {saved:%Y-%m-%d %H:%M:%S}"
