"""`hookline verify-checkpoint`: whether every byte of a checkpoint is as it was written."""

from __future__ import annotations

import argparse
from pathlib import Path

from hookline.cli.checkpoints import print_checkpoint
from hookline.cli.page import open_page


def run(options: argparse.Namespace) -> int:
    """Print what is wrong with one checkpoint; 1 when something is."""
    return print_checkpoint(open_page(), Path(options.path))
