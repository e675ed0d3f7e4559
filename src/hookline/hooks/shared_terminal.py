"""A terminal that a rewritten line shares with everybody who prints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

STREAMS = ("stdout", "stderr")


class MakesWay:
    """Stands in for a stream: whatever is written to it, somebody is told before. All else is the stream's own."""

    def __init__(self, stream: Any, make_way: Callable[[], None]) -> None:
        self.stream, self._make_way = stream, make_way

    def write(self, text: str) -> int:
        self._make_way()
        return int(self.stream.write(text))

    def writelines(self, lines: Iterable[str]) -> None:
        self._make_way()
        self.stream.writelines(lines)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class SharedTerminal:
    """Tells of everything that is printed at a terminal, between `share` and `leave`."""

    def __init__(self, make_way: Callable[[], None]) -> None:
        self._make_way = make_way
        self._ours: dict[str, MakesWay] = {}

    def share(self) -> None:
        """Stand in for those of the standard streams that are terminals."""
        self.leave()
        for name in STREAMS:
            stream = getattr(sys, name)
            if stream is not None and stream.isatty():
                self._ours[name] = MakesWay(stream, self._make_way)
                setattr(sys, name, self._ours[name])

    def leave(self) -> None:
        """Put the streams back, unless somebody has put another there since."""
        for name, ours in self._ours.items():
            if getattr(sys, name) is ours:
                setattr(sys, name, ours.stream)
        self._ours = {}
