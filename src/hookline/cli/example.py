"""`hookline example`: print the config of the default job, with its comments, as a start for other configs."""

from __future__ import annotations

import argparse
from importlib.resources import files

from hookline._console import CommandOutput

DEFAULT = files("hookline.demo") / "default.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command has no arguments of its own."""


def run(options: argparse.Namespace) -> int:
    """Print the file as it is."""
    CommandOutput().write(DEFAULT.read_text(encoding="utf-8"))
    return 0
