"""Write report.html: of a run when it ends, of several that are compared, and of a killed run when it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hookline._fs import explain, refuse_link, write_atomic
from hookline.errors import HooklineError
from hookline.report.page import make_report
from hookline.runs.summary import RunSummary


def write_report(path: Path, summaries: Sequence[RunSummary]) -> None:
    """Make a report and replace the file at once. Raises `HooklineError` if it cannot be written."""
    data = make_report(summaries)
    try:
        refuse_link(path)
        # The report can be made again from the record, so that nobody need wait until the disk has it.
        write_atomic(path, data, durable=False)
    except OSError as error:
        raise HooklineError(explain(path, error)) from error
