"""Run a command in this process and return what it printed."""

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
