"""Write tables, durations, counts, numbers and rates as plain text for people."""

from __future__ import annotations

import math
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


def number(value: float) -> str:
    """Return a loss or a metric as text."""
    if not math.isfinite(value) or value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:,.4f}"
    return f"{value:.3e}"


def short_number(value: float, digits: int = 4) -> str:
    """Return a number with a given number of digits; integers and thousands are written out.

    >>> [short_number(value) for value in (2.40812, 20.0, 12345.0, 12345.6, 1.2e-5, 3.3e8)]
    ['2.408', '20', '12,345', '12,350', '1.2e-05', '3.3e+08']
    """
    if not math.isfinite(value) or abs(value) >= 1e7 or (abs(value) >= 1e6 and value % 1):
        return f"{value:.{digits}g}"
    if value % 1 == 0:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if abs(value) < 1000 else f"{float(f'{value:.{digits}g}'):,.10g}"


def rate(per_second: float, unit: str) -> str:
    """Return a rate as text; for slow things, as a duration."""
    if per_second >= 100:
        return f"{per_second:,.0f} {unit}s/s"
    return f"{per_second:.1f} {unit}s/s" if per_second >= 1 else f"{1 / max(per_second, 1e-9):,.1f} s/{unit}"


def of_total(count: int, total: int | None, unit: str = "") -> str:
    """Return a count as text, with its total if that is known."""
    return f"{count:,}" + (f"/{total:,}" if total else "") + (f" {unit}" if unit else "")


def ordinal(number: int) -> str:
    """Return a number as a place in an order.

    >>> [ordinal(number) for number in (1, 2, 3, 4, 11, 22, 113)]
    ['1st', '2nd', '3rd', '4th', '11th', '22nd', '113th']
    """
    in_teens = number % 100 in (11, 12, 13)
    return f"{number}{'th' if in_teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: '1 step', '2 batches', '100,000 steps'."""
    irregular = {"batch": "batches", "non-finite loss": "non-finite losses", "process": "processes"}
    plural = irregular.get(noun, f"{noun}s")
    return f"{count:,} {noun if count == 1 else plural}"


def first_of(items: Sequence[str], most: int) -> str:
    """Return the first items, and how many more there are: 'a, b and 3 more'."""
    more = len(items) - most
    return ", ".join(items[:most]) + (f" and {more:,} more" if more > 0 else "")
