"""Make docs/images/train.svg: run the default job for 200 steps at a terminal, and draw its screen near the end.

Run it by hand on a quiet machine when the output has changed; its figures differ from machine to machine.
"""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios

import pyte
from pages import DOCS
from rich.console import Console
from rich.text import Text

COLUMNS, LINES = 96, 16
COMMAND = ["train", "trainer.max_steps=200", "trainer.validate_every=60", "trainer.name=baseline"]
SHOWN = re.compile(r"1[5-8]\d/200 steps")  # the screen to draw: after the second validation
STYLES = {"brown": "yellow", "default": ""}  # colours that pyte calls by other names


def main() -> None:
    """Run the command in an empty folder and write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        screen = screen_of([sys.executable, "-m", "hookline", *COMMAND], folder)
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text(f"$ hookline {' '.join(COMMAND)}", style="bold"))
    for line in screen:
        console.print(line)
    path = DOCS / "images" / "train.svg"
    path.parent.mkdir(exist_ok=True)
    picture = console.export_svg(title="hookline train")
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)  # the viewer's own font: nothing is fetched
    path.write_text(picture, encoding="utf-8")
    print(f"wrote {path.relative_to(DOCS.parent)}")


def screen_of(command: list[str], folder: str) -> list[Text]:
    """Run a command at a terminal, and return the lines of the screen when it showed what is looked for."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen(command, cwd=folder, env=environment, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    found: list[Text] = []
    while True:
        try:
            stream.feed(os.read(controller, 1 << 16))
        except OSError:  # the command has ended
            break
        if any(SHOWN.search(line) for line in screen.display):
            found = [as_text(screen, number) for number in range(LINES)]
    process.wait()
    while found and not found[-1].plain.strip():
        found.pop()
    return found


def as_text(screen: pyte.Screen, number: int) -> Text:
    """Return a line of the screen with its styles."""
    line = Text()
    for column in range(COLUMNS):
        letter = screen.buffer[number][column]
        style = " ".join(filter(None, ["bold" if letter.bold else "", STYLES.get(letter.fg, letter.fg)]))
        line.append(letter.data, style)
    line.rstrip()
    return line


if __name__ == "__main__":
    main()
