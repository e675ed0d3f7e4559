"""Terminals for tests: a stream that says it is one, and a pseudo-terminal; pyte reads what is on the screen."""

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Callable

import pyte


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True

    def screen(self, columns: int = 80, rows: int = 40) -> list[str]:
        """What a terminal shows after everything that was written, without empty lines at the end."""
        screen = pyte.Screen(columns, rows)
        screen.set_mode(pyte.modes.LNM)  # a line feed begins a line, as the driver of a real terminal has it
        pyte.Stream(screen).feed(self.getvalue())
        return lines_of(screen)


def lines_of(screen: pyte.Screen) -> list[str]:
    """The lines of a screen without spaces at their ends, and without empty lines at its end."""
    return "\n".join(line.rstrip() for line in screen.display).rstrip().split("\n")


def run_at_terminal(
    script: str, columns: int = 80, rows: int = 30, *, on_screen: Callable[[list[str], int], None] = lambda *_: None,
    **environment: str,
) -> tuple[list[list[str]], bytes]:  # fmt: skip
    """Run a Python script at a pseudo-terminal.

    Args:
        script: The script.
        columns: The width of the terminal.
        rows: Its height.
        on_screen: Called with the lines of the screen whenever something was written, and the terminal's descriptor.
        **environment: Environment variables.

    Returns:
        Every screen that was seen, and everything that was written.
    """
    terminal, inner = pty.openpty()
    resize(terminal, columns, rows)
    others = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
        env={**others, "TERM": "xterm-256color", **environment},
    )  # fmt: skip
    os.close(inner)
    screen = pyte.Screen(columns, rows)
    stream, written, screens = pyte.ByteStream(screen), b"", []
    try:
        while True:
            try:
                chunk = os.read(terminal, 65536)
            except OSError:  # Linux has no end of file for terminals
                break
            if not chunk:
                break
            written += chunk
            stream.feed(chunk)
            screens.append(lines_of(screen))
            on_screen(screens[-1], terminal)
        assert process.wait() == 0, "\n".join(screens[-1])
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    return screens, written


def resize(terminal: int, columns: int, rows: int) -> None:
    """Change the size of a terminal."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
