"""Lay out the lines of the live view: labels, bars and numbers that fit a width, as text for a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

from hookline._console import can_encode, printable

LABEL = 12  # columns; more where a label needs them
MIN_BAR = 8  # columns
STYLES = {
    name: Style.parse(name) for name in ("dim", "bold", "green", "magenta", "cyan", "yellow", "bold red", "bold yellow")
}
Part = str | tuple[str, str]
"""A piece of a line; with one of `STYLES`."""


class Layout:
    """Formats lines for a stream's width: without colors under NO_COLOR, and in ASCII where necessary.

    Lines are put together from strings, because rich's own layout takes six times as long and a step waits for it.

    Args:
        stream: The stream.
        width: The columns of a line.
        plain: Whether to always leave out colors.
    """

    def __init__(self, stream: Any, width: int, plain: bool = False) -> None:
        self.width, self._label = width, LABEL
        self._has_colors = not (plain or os.environ.get("NO_COLOR")) and Console(force_terminal=True).color_system
        self._done, self._half, self._left = ("━", "╸", "─") if can_encode("━╸─", stream) else ("#", "", "-")

    def fits(self, parts: Sequence[Part]) -> bool:
        """Return whether `row` would fit all of the parts."""
        texts = [part if isinstance(part, str) else part[0] for part in parts]
        return cell_len("  ".join(map(printable, texts))) <= self.width - self._label

    def row(self, label: str, parts: Iterable[Part]) -> str:
        """Return a line with as many whole parts as fit; the first one is cut to fit."""
        pieces: list[Part] = [(f"{label:<{self._label}}", "dim")]
        left = self.width - self._label
        for index, part in enumerate(parts):
            written, style = (part, "") if isinstance(part, str) else part
            text = ("  " if index else "") + printable(written)
            left -= cell_len(text)
            if index and left < 0:
                break
            pieces.append((text, style))
        return self._line(pieces)

    def bars(self, rows: Mapping[str, tuple[float | None, Sequence[str]]]) -> list[str]:
        """Return lines with bars of equal lengths, each followed by strings.

        Args:
            rows: By label, the completed share (None for no bar) and the strings after the bar, the least important one
                last.
        """
        self._label = max(LABEL, *(len(label) + 1 for label in rows))  # The rows below get the same width.
        widths = [max(map(len, column)) for column in zip(*(texts for _, texts in rows.values()), strict=True)]
        while len(widths) > 1 and self._label + MIN_BAR + sum(widths) + 2 * len(widths) > self.width:
            widths.pop()
        room = self.width - self._label - sum(widths) - 2 * len(widths)
        lines = []
        for label, (share, texts) in rows.items():
            pieces: list[Part] = [(f"{label:<{self._label}}", "dim")]
            if room >= MIN_BAR:
                pieces += [" " * room] if share is None else self._bar(share, room)
                pieces.append("  ")
            columns = [f"{text:>{width}}" for text, width in zip(texts, widths, strict=False)]
            lines.append(self._line([*pieces, printable("  ".join(columns).rstrip())]))
        return lines

    def _bar(self, share: float, width: int) -> list[Part]:
        halves = round(min(share, 1.0) * width * 2)
        done = self._done * (halves // 2) + self._half * (halves % 2)
        return [(done, "green"), (self._left * (width - len(done)), "dim")]

    def _line(self, pieces: Iterable[Part]) -> str:
        """Join pieces, and cut the line to the width."""
        left, line = self.width, ""
        for piece in pieces:
            text, style = (piece, "") if isinstance(piece, str) else piece
            text = text if cell_len(text) <= left else set_cell_size(text, max(left, 0))
            left -= cell_len(text)
            is_styled = style and text and self._has_colors
            line += STYLES[style].render(text, color_system=ColorSystem.STANDARD) if is_styled else text
        return line
