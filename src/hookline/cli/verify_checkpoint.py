"""`hookline verify-checkpoint`: verify every byte of one checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from hookline.cli.arguments import JSON, argument
from hookline.cli.checkpoints import verify_and_print
from hookline.errors import HooklineError
from hookline.record.format import RUN_FILE
from hookline.runs.named import LAST, find_run

ARGUMENTS = argument("path", "CHECKPOINT", "a checkpoint: its directory, or RUN/best, RUN/last or RUN/NAME") | JSON


def run(options: argparse.Namespace) -> int:
    """Verify and print a checkpoint; return 1 if it is damaged."""
    path = find_run(options.path)
    if not path.is_dir():
        raise HooklineError(
            f"{path} is not a directory; pass a checkpoint's directory, runs/<run_id>/checkpoints/step-…"
        )
    if (path / RUN_FILE).exists():
        given = options.path
        raise HooklineError(
            f"{given} is a run; `hookline checkpoints {given}` verifies all of its checkpoints, and "
            f"`hookline verify-checkpoint {given}/{LAST}` the newest one"
        )
    from hookline.checkpoints.store import SavedCheckpoint, checkpoints_in

    checkpoint = SavedCheckpoint(path)
    if Path(options.path).name == LAST and path.name == "checkpoints":
        checkpoint = next(iter(checkpoints_in(path)), checkpoint)  # the newest, damaged or not
    return verify_and_print([checkpoint], options.json)
