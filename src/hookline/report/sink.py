"""Write report.html while a run is recorded: after each checkpoint and when the record is closed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline._console import logger
from hookline._fs import explain, refuse_link, write_atomic
from hookline.errors import HooklineError
from hookline.record.summary import RunSummary
from hookline.report import REPORT
from hookline.report.page import make_report

if TYPE_CHECKING:
    from hookline.record.record import Record

_MOST_OF_TIME = 0.02  # of a run that is spent on reports, if it saves checkpoints very often


class ReportSink:
    """A sink that keeps a summary of the run in bounded memory, from which the report is made without reading the log.

    A disk that refuses the report causes one warning; the next report is tried all the same.

    Args:
        record: The record of the run, in a directory; it may have rows of earlier attempts.
        step: The step that the run begins after; what earlier attempts recorded of later ones does not count.

    Raises:
        RecordError: If the record cannot be read.
    """

    def __init__(self, record: Record, step: int) -> None:
        assert record.path is not None
        # What was written before is read from the files, so that it must not arrive again. Without waiting, which would
        # be an exchange between several ranks, and only rank 0 is here.
        record.flush()
        self._record, self._path = record, record.path / REPORT
        self._summary = RunSummary.read(record.path, until=step, media=True)
        self._next_write = 0.0
        self._warned = False

    def write_metrics(self, rows: Sequence[dict[str, Any]], /) -> None:
        """Add rows of metrics."""
        self._summary.write_metrics(rows)

    def write_layers(self, rows: Sequence[Any], /) -> None:
        """Add statistics per layer."""
        self._summary.write_layers(rows)

    def write_media(self, rows: Sequence[Any], /) -> None:
        """Add tables and images."""
        self._summary.write_media(rows)

    def write_events(self, rows: Sequence[dict[str, Any]], /) -> None:
        """Add events, and write the report if a checkpoint was saved: a run that is killed later has one."""
        self._summary.write_events(rows)
        if any(row.get("kind") == "checkpoint_saved" for row in rows) and time.monotonic() >= self._next_write:
            self._write(self._record.run)

    def close(self, run: Mapping[str, Any]) -> None:
        """Write the report with the run's outcome."""
        self._write(run)

    def _write(self, run: Mapping[str, Any]) -> None:
        begin = time.monotonic()
        self._summary.run = dict(run)
        try:
            write_report(self._path, [self._summary])
        except HooklineError as error:
            if not self._warned:
                logger.warning("the report was not written, training continues: %s", error)
            self._warned = True
        end = time.monotonic()
        self._next_write = end + (end - begin) / _MOST_OF_TIME


def write_report(path: Path, summaries: Sequence[RunSummary]) -> None:
    """Make a report and replace the file at once. Raises `HooklineError` if it cannot be written."""
    data = make_report(summaries)
    try:
        refuse_link(path)
        # The report can be made again from the record, so that training need not wait until the disk has it.
        write_atomic(path, data, durable=False)
    except OSError as error:
        raise HooklineError(explain(path, error)) from error
