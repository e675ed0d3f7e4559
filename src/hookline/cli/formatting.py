"""The layout of the commands' output: headings, paragraphs whose lines keep their indentation, tables.

The printed text may come from a stranger's file, so every function makes it safe for a terminal.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hookline._console import printable
from hookline._text import short_number
from hookline.cli.output import CommandOutput
from hookline.errors import HooklineError
from hookline.record import strict_json

if TYPE_CHECKING:
    from hookline.runs.curves import Point

MAX_WIDTH = 200  # The width of the output in terminals that are wider.
_MAX_NAME_LENGTH = 200  # characters of a shortened name, even if that makes it equal to another one


def bounded(text: str, longest: int = 300) -> str:
    """Return a string of bounded length; a longer one is cut and ends with "…"."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def shorten(names: Sequence[str], longest: int) -> list[str]:
    """Return the names, shortened in the middle where they are too long but still different from each other.

    >>> shorten(["train/epoch_accuracy", "train/epoch_loss", "lr"], 12)
    ['train…curacy', 'train…h_loss', 'lr']

    Args:
        names: Different names.
        longest: How many characters each may have; more if they would otherwise be the same.
    """
    while True:
        head = (longest - 1) // 2
        tail = longest - 1 - head
        cuts = [name if len(name) <= longest else f"{name[:head]}…{name[-tail:]}" for name in names]
        if len(set(cuts)) == len(names) or longest >= _MAX_NAME_LENGTH:
            return cuts
        longest = min(longest * 5 // 4, _MAX_NAME_LENGTH)


def point_text(point: Point | None, with_step: bool = True) -> str:
    """Return a value and, in parentheses, its step."""
    if point is None:
        return "-"
    value = short_number(point.value)
    return f"{value} ({point.step:,})" if with_step else value


def check_output(path: Path) -> None:
    """Raise `HooklineError` if a file cannot be written there because of its path."""
    if path.is_dir():
        raise HooklineError(f"cannot write {path}: it is a directory; pass the name of a file")
    if not path.parent.is_dir():
        raise HooklineError(f"cannot write {path}: the directory {path.parent}/ does not exist; create it first")


def open_console() -> Console:
    """Return a console that respects NO_COLOR and the terminal's width, and writes plain text into files and pipes."""
    return Console(file=cast(TextIO, CommandOutput()), highlight=False, markup=False, emoji=False)


def heading(console: Console, title: str, aside: str = "") -> None:
    """Print a bold word, with quieter text next to it."""
    title, aside = (" ".join(printable(text).splitlines()) for text in (title, aside))
    console.print(Text.assemble((title, "bold"), (f"  {aside}" if aside else "", "dim")))


def paragraph(console: Console, text: str, indent: int = 4, hanging: int = 0) -> None:
    """Print an indented paragraph; `hanging` indents the lines after the first further."""
    for line in _wrapped(console, text, " " * indent, " " * (indent + hanging)):
        console.print(line)


def labeled(console: Console, label: str, text: str, indent: int = 4, width: int = 11, style: str = "dim") -> None:
    """Print a label of at least `width` columns, and next to it a paragraph whose lines begin at the same column."""
    label = printable(label)
    begin = indent + max(width, len(label) + 1)
    first, *others = _wrapped(console, text, " " * begin, " " * begin)
    console.print(Text.assemble((" " * indent + label.ljust(begin - indent), style), first[begin:]))
    for line in others:
        console.print(line)


def print_json(value: Any, indent: int | None = 1) -> None:
    """Print strict JSON, in ASCII; as in a record, numbers that JSON lacks are "NaN", "Infinity" and "-Infinity"."""
    CommandOutput().write(f"{json.dumps(strict_json.simplify(value), indent=indent, allow_nan=False)}\n")


def table(
    console: Console,
    columns: Mapping[str, Mapping[str, Any]],
    rows: Iterable[tuple[Sequence[str | Text], str]],
    width: int = MAX_WIDTH,
) -> None:
    """Print a table without lines that fits the terminal; long cells wrap, and a line break is a space.

    Args:
        console: Where to print.
        columns: By header: keyword arguments of `rich.table.Table.add_column`.
        rows: Cells and a style each; a `Text`, which has its own styles, must be safe to print.
        width: The maximum width of the table, in characters.
    """

    def clean(text: str) -> str:
        return printable(text).replace("\n", " ")

    made = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for title, options in columns.items():
        made.add_column(clean(title), **options)
    for cells, style in rows:
        made.add_row(*(cell if isinstance(cell, Text) else clean(cell) for cell in cells), style=style)
    with console.capture() as captured:
        console.print(made, width=min(console.width, width))
    # rich pads every cell to its column; files and pipes need no trailing spaces.
    console.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def _wrapped(console: Console, text: str, first: str, others: str) -> list[str]:
    width = max(min(console.width, MAX_WIDTH), len(others) + 20)
    text = printable(text)
    # Names and paths with hyphens stay whole, so that they can be copied.
    wrapper = textwrap.TextWrapper(
        width, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.wrap(text) or [""]
