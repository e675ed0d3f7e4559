"""Print, log and warn without ending a run: streams may lack characters, or be full, closed, missing or broken."""

from __future__ import annotations

import codecs
import logging
import sys
import warnings
from typing import Any

READABLE = "hookline_readable"  # an error handler for codecs that replaces missing characters with readable ASCII
_IN_ASCII = {"→": "->", "…": "...", "±": "+-", "\N{MINUS SIGN}": "-", "µ": "u", "≤": "<=", "≥": ">="}


def _replace(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letter = error.object[error.start]
    if letter in _IN_ASCII:
        return _IN_ASCII[letter], error.start + 1
    return letter.encode("ascii", "backslashreplace").decode(), error.start + 1


codecs.register_error(READABLE, _replace)


def printable(text: str) -> str:
    """Make text from a file, a plugin or an exception safe to print.

    Control characters, which a terminal would obey, and characters that reverse or hide text become visible escapes.
    Line breaks and tabs stay. The layout functions of the command line apply it to everything.
    """
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)


def can_encode(text: str, output: Any) -> bool:
    """Return whether a stream or rich's console can encode all characters of a string."""
    try:
        text.encode(getattr(output, "encoding", None) or "utf-8")
    except (UnicodeError, LookupError):
        return False
    return True


def print_line(text: str = "", stream: Any = None, end: str = "\n") -> None:
    """Print to a stream and flush it; output that cannot be printed is lost, because training matters more.

    Args:
        text: The text. Characters that the stream's encoding lacks are replaced.
        stream: Where to print, instead of standard output.
        end: What to print after the text.
    """
    try:
        stream = sys.stdout if stream is None else stream
        try:
            stream.write(text + end)
        except UnicodeEncodeError:
            encoding = getattr(stream, "encoding", None) or "ascii"  # the error has 'charmap' for cp1252
            stream.write((text + end).encode(encoding, READABLE).decode(encoding))
        stream.flush()
    except Exception:  # a full disk, a closed pipe or file, no console, and whatever a replaced sys.stdout raises
        return


class RunLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that drops a line if a handler fails; Python's own raises, for example if `sys.stderr` is closed."""

    rank = 0
    """This process's rank. Only rank 0 logs messages that would be the same on all ranks."""

    def log(  # type: ignore[override]
        self, level: int, msg: object, *args: Any, of_rank: bool = False, **kwargs: Any
    ) -> None:
        """Log a line, or lose it; ranks other than 0 log only what concerns them (`of_rank`)."""
        if self.rank:
            if not of_rank:
                return
            msg = f"rank {self.rank}: {msg}"
        try:
            super().log(level, msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})
        except Exception:
            return


logger = RunLogger(logging.getLogger("hookline"), {})


def warn(message: str, stacklevel: int) -> None:
    """Issue a `RuntimeWarning` that is safe to print, or lose it; `stacklevel` is that of `warnings.warn`."""
    if logger.rank:
        return
    try:
        warnings.warn(printable(message), RuntimeWarning, stacklevel + 1)
    except RuntimeWarning:  # a filter that the user installed turns warnings into errors
        raise
    except Exception:
        return


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal; one that is None, closed or of another class is not."""
    try:
        return bool(stream.isatty())
    except Exception:
        return False


class RunOutput:
    """A stream during a run for libraries that print; `print_line` does the writing."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.encoding = getattr(stream, "encoding", None)

    def write(self, text: str) -> None:
        """Write text, or lose it."""
        print_line(text, self.stream, end="")

    def flush(self) -> None:
        """Do nothing: every write is flushed."""

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return is_terminal(self.stream)
