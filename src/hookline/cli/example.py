"""`hookline example`: the config of the default job, with its comments, to begin one's own with."""

from __future__ import annotations

import argparse

from hookline.cli.settings import DEFAULT


def run(options: argparse.Namespace) -> int:
    """Print the file as it is."""
    print(DEFAULT.read_text(encoding="utf-8"), end="")
    return 0
