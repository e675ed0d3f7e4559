"""How the commands' pages look: headings, and paragraphs whose lines keep their indentation when they wrap."""

from __future__ import annotations

import textwrap

from rich.console import Console
from rich.text import Text

WIDEST = 100  # longer lines are tiring to read


def open_page() -> Console:
    """A console that respects NO_COLOR and the terminal's width, and writes plain text into files and pipes."""
    return Console(highlight=False, markup=False, emoji=False)


def heading(console: Console, title: str, aside: str = "") -> None:
    """A bold word, and something quieter beside it."""
    console.print(Text.assemble((title, "bold"), (f"  {aside}" if aside else "", "dim")))


def entry(console: Console, text: str, indent: int = 4, hanging: int = 0) -> None:
    """A paragraph set in from the left; `hanging` sets the lines after the first further in."""
    for line in _wrapped(console, text, " " * indent, " " * (indent + hanging)):
        console.print(line)


def labelled(console: Console, label: str, text: str, indent: int = 4, width: int = 11) -> None:
    """A label, and a paragraph beside it whose lines all begin at the same column."""
    begin = indent + max(width, len(label) + 1)
    first, *others = _wrapped(console, text, " " * begin, " " * begin)
    console.print(Text.assemble((" " * indent + label.ljust(begin - indent), "dim"), first[begin:]))
    for line in others:
        console.print(line)


def _wrapped(console: Console, text: str, first: str, others: str) -> list[str]:
    width = max(min(console.width, WIDEST), len(others) + 20)
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=others, break_long_words=False) or [""]
