"""`hookline example`: print the config of the default job, with its comments, as a start for other configs."""

from __future__ import annotations

import argparse
from importlib.resources import files

from hookline.cli.arguments import Arguments
from hookline.cli.output import CommandOutput

DEFAULT = files("hookline.demo") / "default.yaml"

ARGUMENTS: Arguments = {}


def run(options: argparse.Namespace) -> int:
    """Print the file as it is."""
    CommandOutput().write(DEFAULT.read_text(encoding="utf-8"))
    return 0
