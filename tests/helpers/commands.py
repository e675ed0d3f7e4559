"""Run a command in this process and return what it printed, or a fresh interpreter."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from hookline.cli import main

Captured = pytest.CaptureFixture[str]


def output_of(capsys: Captured, arguments: Sequence[str], status: int = 0) -> str:
    """Run a command, check its exit status, and return its standard output."""
    assert main(arguments) == status
    return capsys.readouterr().out


def error_of(capsys: Captured, arguments: Sequence[str], status: int = 2) -> str:
    """Run a command, check its exit status, and return its standard error."""
    assert main(arguments) == status
    return capsys.readouterr().err


def line_of_error(capsys: Captured, *words: str) -> str:
    """Return the one line on stderr of a command that is refused with status 2 and prints nothing else."""
    assert main(words) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("hookline: error: ") and error.count("\n") == 1
    return error


def json_of(capsys: Captured, *words: object) -> Any:
    """Return what a command prints with --json, which must be strict JSON and nothing else."""
    return json.loads(output_of(capsys, [*map(str, words), "--json"]), parse_constant=pytest.fail)


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
