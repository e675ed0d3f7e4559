"""Notice writes to the terminal, so that a progress line that is rewritten in place can be ended first."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any


class StreamProxy:
    """Replaces a stream of `sys`: calls `before_write` before every write, and is the stream in all else."""

    def __init__(self, stream: Any, before_write: Callable[[], None]) -> None:
        self.stream, self._before_write = stream, before_write

    def write(self, text: str) -> Any:
        """Write to the stream and return what its `write` returns; custom streams may return None."""
        self._before_write()
        return self.stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write lines to the stream."""
        self._before_write()
        self.stream.writelines(lines)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class TerminalWatcher:
    """Calls `before_write` before anything is printed to a terminal, between `start` and `stop`."""

    def __init__(self, before_write: Callable[[], None]) -> None:
        self._before_write = before_write
        self._proxies: dict[str, StreamProxy] = {}

    def start(self) -> None:
        """Replace the standard streams that are terminals."""
        self.stop()
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            # A stream may be None, one of another class without `isatty`, or closed.
            with suppress(AttributeError, ValueError):
                if stream.isatty():
                    self._proxies[name] = StreamProxy(stream, self._before_write)
                    setattr(sys, name, self._proxies[name])

    def stop(self) -> None:
        """Put the streams back, unless they were replaced since; overlapping runs may end in any order."""
        for name, own in self._proxies.items():
            current = getattr(sys, name)
            if current is own:
                setattr(sys, name, own.stream)
            while isinstance(current, StreamProxy):  # take it out from under the proxies of later runs
                current.stream = own.stream if current.stream is own else current.stream
                current = current.stream
        self._proxies = {}

    @property
    def stdout(self) -> Any:
        """The standard output without the proxy."""
        return self._proxies["stdout"].stream if "stdout" in self._proxies else sys.stdout
