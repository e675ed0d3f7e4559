"""`hookline verify-checkpoint`: whether every byte of a checkpoint is as it was written."""

from __future__ import annotations

import argparse
from pathlib import Path

from hookline.cli.checkpoints import print_checkpoint
from hookline.cli.page import open_page
from hookline.errors import HooklineError


def run(options: argparse.Namespace) -> int:
    """Print what is wrong with one checkpoint; 1 when something is."""
    path = Path(options.path)
    if not path.is_dir():
        raise HooklineError(f"{path} is no directory; give a checkpoint's, runs/<run_id>/checkpoints/step-…")
    return print_checkpoint(open_page(), path)
