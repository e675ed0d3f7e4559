"""Write to standard output in a command that only prints: if that fails, the command ends and says why."""

from __future__ import annotations

import os
import sys
from typing import Any

from hookline._console import READABLE


class OutputError(Exception):
    """Standard output cannot be written; `cause` is the error."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"standard output cannot be written: {getattr(cause, 'strerror', None) or cause}")
        self.cause = cause


class CommandOutput:
    """Standard output of a command that only prints: its failures end the command as an `OutputError`."""

    def __init__(self) -> None:
        self.stream = sys.stdout

    def write(self, text: str) -> None:
        """Write text, unless there is no console."""
        self._call("write", text)

    def flush(self) -> None:
        """Flush the stream."""
        self._call("flush")

    def _call(self, method: str, *arguments: str) -> None:
        try:
            if self.stream is not None:
                getattr(self.stream, method)(*arguments)
        except (OSError, ValueError) as error:  # ValueError: it is closed
            raise OutputError(error) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def replace_missing_characters(stream: Any) -> None:
    """Let a stream replace characters that its encoding lacks, unless a user chose another way or it cannot."""
    if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
        stream.reconfigure(errors=READABLE)


def drop_unwritten_output() -> OutputError | None:
    """Flush standard output; if that fails, drop what is left, and return why.

    Python flushes it once more when it exits, which would fail again, print a traceback and change the exit status.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        return OutputError(error)
    except Exception:  # there is none, it is closed, or it is not a stream
        pass
    return None
