"""Write tables and durations as plain text for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as plain text, with every column as wide as its widest cell."""
    lines = [tuple(header), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def duration_text(seconds: float) -> str:
    """Return a duration in its two largest units: 4.2 s, 1 m 15 s, 1 h 02 m, 2 d 07 h."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    units = ((86_400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s"))
    size, unit, smaller, name = next(row for row in units if whole >= row[0])
    return f"{whole // size} {unit} {whole % size // smaller:02} {name}"
