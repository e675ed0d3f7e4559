"""`Pending`: rows of a record whose numbers are on their way from a device to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hookline._device import HostCopy


class Pending:
    """Rows of one kind that are written once their numbers are on the host.

    Args:
        kind: The kind of the rows.
        copies: The copies that they wait for.
        read: Waits for the copies and returns the rows; raises the error of a device that failed.
    """

    def __init__(self, kind: str, copies: Sequence[HostCopy], read: Callable[[], list[Any]]) -> None:
        self.kind = kind
        self.lost: list[Exception] = []  # one per row, or per metric, that could not be read
        self._copies, self._read = copies, read

    def is_ready(self) -> bool:
        """Return whether every copy is complete; never waits."""
        return all(copy.is_ready() for copy in self._copies)

    def rows(self) -> list[Any]:
        """Wait for the copies and return the rows that could be read."""
        try:
            return self._read()
        except Exception as error:
            self.lost.append(error)
            return []
