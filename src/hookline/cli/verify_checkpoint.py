"""`hookline verify-checkpoint`: verify every byte of one checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from hookline.cli.arguments import JSON, argument
from hookline.cli.checkpoints import verify_and_print
from hookline.errors import HooklineError

ARGUMENTS = argument("path", "CHECKPOINT", "the checkpoint's directory") | JSON


def run(options: argparse.Namespace) -> int:
    """Verify and print a checkpoint; return 1 if it is damaged."""
    path = Path(options.path)
    if not path.is_dir():
        raise HooklineError(f"{path} is not a directory; give a checkpoint's, runs/<run_id>/checkpoints/step-…")
    return verify_and_print([path], options.json)
