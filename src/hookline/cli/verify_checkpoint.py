"""`hookline verify-checkpoint`: verify every byte of one checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from hookline.cli import arguments
from hookline.cli.checkpoints import verify_and_print
from hookline.errors import HooklineError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint."""
    parser.add_argument("path", metavar="CHECKPOINT", help="the checkpoint's directory")
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Verify and print a checkpoint; return 1 if it is damaged."""
    path = Path(options.path)
    if not path.is_dir():
        raise HooklineError(f"{path} is not a directory; give a checkpoint's, runs/<run_id>/checkpoints/step-…")
    return verify_and_print([path], options.json)
