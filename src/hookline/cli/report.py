"""`hookline report`: write report.html from the record of a run, or of several to compare them."""

from __future__ import annotations

import argparse
from pathlib import Path

from hookline._console import printable
from hookline._fs import relative_to_here
from hookline.cli.arguments import RUNS, argument
from hookline.cli.formatting import check_output
from hookline.cli.output import CommandOutput
from hookline.report import REPORT
from hookline.report.page import write_report
from hookline.runs.summary import RunSummary

COMPARISON = "comparison.html"

ARGUMENTS = RUNS | argument("--output", "FILE", "write it to this file")


def run(options: argparse.Namespace) -> int:
    """Write the report, into the run's directory unless another file is given, and print its path."""
    if options.output is not None:
        check_output(Path(options.output))
    summaries = [RunSummary.read(run, media=True, numbers=len(options.runs) > 1) for run in options.runs]
    default = options.runs[0].path / REPORT if len(options.runs) == 1 else Path(COMPARISON)
    path = default if options.output is None else Path(options.output)
    write_report(path, summaries)
    CommandOutput().write(f"{printable(str(relative_to_here(path)))}\n")
    return 0
