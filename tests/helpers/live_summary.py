"""A summary that follows a record in memory, so that a test of what it keeps need not write files."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from hookline.runs.summary import RunSummary


class LiveSummary(RunSummary):
    """A sink that adds the rows of a record as they come."""

    def write_layers(self, rows: Iterable[Any], /) -> None:
        """Add steps of statistics per layer."""
        for row in rows:
            self._add_layers(row.step, row.header, np.asarray(row.values, dtype=np.float32))
