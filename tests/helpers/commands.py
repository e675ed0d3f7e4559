"""Run a command in this process and return what it printed, or a fresh interpreter."""

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from hookline.cli import main


def output_of(capsys: pytest.CaptureFixture[str], arguments: Sequence[str], status: int = 0) -> str:
    """Run a command, check its exit status, and return its standard output."""
    assert main(arguments) == status
    return capsys.readouterr().out


def error_of(capsys: pytest.CaptureFixture[str], arguments: Sequence[str], status: int = 2) -> str:
    """Run a command, check its exit status, and return its standard error."""
    assert main(arguments) == status
    return capsys.readouterr().err


def python(*arguments: object, check: bool = False) -> "subprocess.CompletedProcess[str]":
    """Run a fresh interpreter that finds what this one does, and return what it printed and its exit status.

    Args:
        arguments: Those of the interpreter, such as ``"-c"`` and a program.
        check: Whether a status other than 0 fails the test.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert not check or done.returncode == 0, done.stderr
    return done
