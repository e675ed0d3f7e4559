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

    def write(self, text: str) -> Any:
        self._make_way()
        return self.stream.write(text)  # whatever that is: many a stream of somebody's own returns None

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
            if _is_terminal(stream):
                self._ours[name] = MakesWay(stream, self._make_way)
                setattr(sys, name, self._ours[name])

    def leave(self) -> None:
        """Put the streams back, unless somebody has put another there since; runs may overlap, and end in any order."""
        for name, ours in self._ours.items():
            above = getattr(sys, name)
            if above is ours:
                setattr(sys, name, ours.stream)
            while isinstance(above, MakesWay):
                above.stream = ours.stream if above.stream is ours else above.stream
                above = above.stream
        self._ours = {}

    @property
    def stdout(self) -> Any:
        """The stream itself: what this stands in for, or what is there now."""
        return self._ours["stdout"].stream if "stdout" in self._ours else sys.stdout


def _is_terminal(stream: Any) -> bool:
    """Also of a stream that is closed, that is None, or that is somebody's own and cannot tell."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False
