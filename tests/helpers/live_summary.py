"""A summary that follows a record in memory, so that a test of what it keeps need not write files."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from hookline.runs.find import RunFiles
from hookline.runs.reader import columns_of_rows
from hookline.runs.summary import RunSummary


class LiveSummary(RunSummary):
    """A sink that adds the rows of a record as they come; `run` are the fields of its run.json."""

    def __init__(self, run: dict[str, Any] | None = None) -> None:
        files = RunFiles("a directory that does not exist")
        files.run = run or {}
        super().__init__(files)

    def write_metrics(self, rows: Iterable[dict[str, Any]], /) -> None:
        """Add rows of metrics."""
        self.add_metrics(columns_of_rows([*rows]))

    def write_events(self, rows: Iterable[dict[str, Any]], /) -> None:
        """Add events."""
        self.events += rows

    def write_layers(self, rows: Iterable[Any], /) -> None:
        """Add steps of statistics per layer."""
        for row in rows:
            self.add_layers(row.step, row.header, np.asarray(row.values, dtype=np.float32))
