"""Draw lines that stay below all other output of a process at a terminal.

While a region is drawn, the cursor stays where other output left it, on the line above the region. Output of another
library, a forked process or the terminal itself is not disturbed there, and the next drawing is below it. Nothing
depends on how the region looked when it was drawn: if the terminal was resized since and has wrapped its lines, the
region is still erased completely.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from shutil import get_terminal_size
from typing import Any

from hookline._console import is_terminal, print_line

_MOVES = re.compile(r"(\r|\n|\x1b\[[0-9;?]*[A-Za-z])")
_LOCK_SECONDS = 1.0  # a forked process may inherit a lock that nothing releases


def is_notebook(stream: Any) -> bool:
    """Return whether a stream writes into the output of a notebook's cell."""
    return type(stream).__module__.partition(".")[0] == "ipykernel"


def can_redraw(stream: Any) -> bool:
    """Return whether drawn lines can be replaced: in a notebook, and on a terminal that knows escape sequences."""
    return is_notebook(stream) or (is_terminal(stream) and os.environ.get("TERM") not in ("dumb", "unknown"))


class Region:
    """Some lines at the end of the output of a terminal; other output is printed above them."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self.lines: Sequence[str] = ()
        self.width = 0

    @property
    def columns(self) -> int:
        """The current number of columns of the terminal."""
        return self._screen.size().columns

    def draw(self, lines: Sequence[str], width: int) -> None:
        """Replace the lines, none of which is longer than the width; nothing is drawn after `close`."""
        self.lines, self.width = lines, width
        self._screen.draw()

    def print_line(self, line: str) -> None:
        """Print a line above the region."""
        self._screen.print_line(line)

    def close(self) -> None:
        """Erase the lines; a second call does nothing."""
        self._screen.remove(self)


class Screen:
    """A terminal with regions; overlapping runs have several, which are drawn one below the other.

    Args:
        stream: A stream that writes to the terminal.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.is_drawn = self._draws_again = False
        self._regions: list[Region] = []
        self._cursor = CursorPosition()
        self._lock = threading.RLock()
        others = [other for other in (sys.stdout, sys.stderr) if other is not stream and is_terminal(other)]
        self._out = WatchedStream(stream, self)
        self._watched = [self._out, *(WatchedStream(other, self) for other in dict.fromkeys(others))]

    def size(self) -> os.terminal_size:
        """Return the current columns and rows; the usual ones if they are unknown."""
        with suppress(Exception):  # not a file, or closed
            # The watched stream's descriptor: other code that asks for one makes the screen erase itself.
            size = os.get_terminal_size(self._out.fileno())
            if size.columns and size.lines:  # the terminal of a container may say 0
                return size
        return get_terminal_size()

    def add(self) -> Region:
        """Add a region without lines."""
        region = Region(self)
        with self._locked():
            self._regions.append(region)
        return region

    def remove(self, region: Region) -> None:
        """Remove a region, and with the last one the screen."""
        with self._locked():
            if region not in self._regions:
                return
            self.erase()
            self._regions.remove(region)
            if self._regions:
                self.draw()
                return
            self._write("\r\n" * (self._cursor.below + bool(self._cursor.column)))  # the next output begins a line
            for stream in self._watched:
                stream.restore()
            _screens.remove(self)

    def draw(self) -> None:
        """Draw all regions, unless the terminal has become too small for their lines."""
        with self._locked():
            (columns, rows), above = self.size(), self._cursor.below + 1
            lines = [line for region in self._regions for line in region.lines][: max(rows - above, 0)]
            if not lines or any(region.width > columns for region in self._regions):
                self.erase()
                return
            for stream in self._watched:
                stream.flush()  # earlier output has to come first
            # Moving down by lines (IND) scrolls if it must, and keeps the column, which is not certainly known.
            down = above + len(lines) - 1
            room = "\x1bD" * down + f"\x1b[{down}A"
            self._write(f"{self._cursor.clear_line}{room}\x1b7\x1b[{above}B\r\x1b[J" + "\r\n".join(lines) + "\x1b8")
            self.is_drawn = True

    def erase(self, for_now: bool = False) -> None:
        """Erase the regions until they are drawn again: if only for now, by the next line of other output."""
        self._draws_again = for_now and (self._draws_again or self.is_drawn)
        if self.is_drawn:
            self.is_drawn = False
            self._write(f"{self._cursor.clear_line}\x1b7\x1b[{self._cursor.below + 1}B\r\x1b[J\x1b8")

    @contextmanager
    def writing(self, text: str) -> Iterator[None]:
        """Erase the regions while other text is written, and draw them again if it does not end inside a line.

        A prompt ends inside one, and a user who answers it must not be disturbed.
        """
        with self._locked():
            self.erase(for_now=True)
            yield
            self._cursor.follow(text)
            if self._draws_again and (text.endswith("\n") or "\r" in text):
                self.draw()

    def print_line(self, line: str) -> None:
        """Print a line above the regions: in the place of a progress bar, but below an unfinished line."""
        text = ("\n" if self._cursor.column and not self._cursor.is_rewritten else "\r\x1b[K") + line + "\n"
        with self.writing(text):
            self._write(text)

    def _write(self, text: str) -> None:
        print_line(text, self._out, end="")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        acquired = self._lock.acquire(timeout=_LOCK_SECONDS)
        try:
            yield
        finally:
            if acquired:
                self._lock.release()


_screens: list[Screen] = []


def open_region(stream: Any) -> Region:
    """Return a new region at the terminal that a stream writes to; `Region.close` must be called."""
    screen = next((screen for screen in _screens if screen.stream is stream), None)
    if screen is None:
        screen = Screen(stream)
        _screens.append(screen)
    return screen.add()


def begin_line() -> str:
    """Return what begins a new line at the terminal, for a signal handler, which must not wait for a lock."""
    return "\r\n\x1b[J" if any(screen.is_drawn for screen in _screens) else "\n"


class WatchedStream:
    """A stream whose writes a screen notices; its own writes go unnoticed.

    The stream's own `write` is replaced, and not the stream in `sys`: a progress bar or a handler of a logger that was
    created before the run holds the stream itself. `fileno` is replaced, too, because code that asks for it may write
    to the terminal past the stream, as `input` does for its prompt.
    """

    def __init__(self, stream: Any, screen: Screen) -> None:
        self.stream, self.encoding = stream, getattr(stream, "encoding", None)
        self._screen = screen
        self.write = stream.write
        self.fileno: Any = getattr(stream, "fileno", None)
        self._before = {name: vars(stream)[name] for name in ("write", "fileno") if name in _attributes(stream)}
        self._replaced = {"write": self._noticed_write, "fileno": self._noticed_fileno}
        with suppress(AttributeError, TypeError):  # an object without attributes is not noticed
            for name, function in self._replaced.items():
                setattr(stream, name, function)

    def flush(self) -> None:
        """Flush the stream; nothing happens if that fails."""
        with suppress(Exception):
            self.stream.flush()

    def restore(self) -> None:
        """Restore the stream."""
        for name, function in self._replaced.items():
            if _attributes(self.stream).get(name) == function:  # otherwise other code has replaced it since
                delattr(self.stream, name)
                if name in self._before:
                    setattr(self.stream, name, self._before[name])

    def _noticed_write(self, text: str) -> Any:
        with self._screen.writing(text):
            return self.write(text)

    def _noticed_fileno(self) -> int:
        self._screen.erase()
        return int(self.fileno())


def _attributes(stream: Any) -> dict[str, Any]:
    return getattr(stream, "__dict__", {})


class CursorPosition:
    """The place where other output has left the cursor."""

    def __init__(self) -> None:
        self.column = 0
        """How much of a line was written; 0 at its beginning."""
        self.is_rewritten = False
        """Whether the line is rewritten repeatedly, like a progress bar."""
        self.below = 0
        """Lines below the cursor: several progress bars move it up again."""

    @property
    def clear_line(self) -> str:
        """The sequence that clears an unwritten line: a child process may have left the cursor on a drawn one."""
        return "" if self.column or self.is_rewritten else "\x1b[K"

    def follow(self, text: str) -> None:
        """Follow what text does to the cursor: line ends, carriage returns, and sequences that move it up and down."""
        if "\x1b" not in text and not self.below:  # nearly always
            _, end, text = text.rpartition("\n")
            if end:
                self.column, self.is_rewritten = 0, False
        for part in _MOVES.split(text):
            if part in ("\r", "\n"):
                self.column, self.is_rewritten = 0, part == "\r"
                self.below = max(self.below - (part == "\n"), 0)
            elif part[:2] == "\x1b[" and part[-1] in "AB":
                lines = int(part[2:-1]) if part[2:-1].isdecimal() else 1
                self.below = max(self.below + (lines if part[-1] == "A" else -lines), 0)
            elif part and part[0] != "\x1b":
                self.column += len(part)
