"""Curves in a terminal: what is drawn where, in any width, encoding and for any numbers."""

import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from hookline.cli.charts import draw_chart
from hookline.runs.curves import Curve

NAN, INF = float("nan"), float("inf")
BRAILLE = {chr(code) for code in range(0x2801, 0x2900)}


def draw(curves: dict[str, Any], width: int = 80, encoding: str = "utf-8", coloured: bool = False, **more: Any) -> str:
    """Return what is drawn; with colours as a terminal gets it."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict", newline="\n")
    system = "standard" if coloured else None
    console = Console(file=file, width=width, color_system=system, force_terminal=coloured, _environ={})
    draw_chart(console, curves, title="title", **more)
    file.flush()
    return file.buffer.getvalue().decode(encoding)


def one(values: Any, steps: Any = None) -> dict[str, Any]:
    """Return the curve of single values."""
    curve = Curve()
    curve.extend(range(1, len(values) + 1) if steps is None else steps, [*map(float, values)])
    return {"loss": curve}


def plot_of(text: str) -> list[str]:
    """Return the rows of the plot, without the axis of values."""
    return [
        line.partition(line.lstrip(" 0123456789.-+ekMGT")[0])[2] for line in text.splitlines() if set("┤│") & set(line)
    ]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_falling_curve_fills_the_width(width: int) -> None:
    """It begins at the upper left, ends at the lower right, and no line is wider than the terminal."""
    text = draw(one(np.linspace(4, 0, 500)), width)
    lines, rows = text.splitlines(), plot_of(text)
    assert max(map(len, lines)) == width
    assert len(rows) == 10
    assert rows[0][0] in BRAILLE and rows[-1][-1] in BRAILLE
    assert all(row.strip() for row in rows)
    assert rows[0].rstrip() == rows[0].strip() and rows[-1][0] == " "


def test_axes_have_round_numbers() -> None:
    """Values and steps are labelled with round numbers and units."""
    text = draw(one(np.linspace(0.1, 4.2, 300), np.arange(0, 300_000, 1000)))
    assert [line.split("┤")[0].strip() for line in text.splitlines() if "┤" in line] == ["4", "3", "2", "1"]
    assert [line.split() for line in text.splitlines() if line.startswith(" step")] == [
        ["step", "0", "50k", "100k", "150k", "200k", "250k"]
    ]
    small = draw(one([1e-5, 2e-5, 3e-5]))
    assert "3.0e-05┤" in small or "3e-05┤" in small


def test_a_spike_inside_a_bucket_is_drawn() -> None:
    """A bucket whose lowest and highest value differ covers all rows between them."""
    curves = one(np.ones(100))
    curves["loss"].highest[50] = 9.0
    rows = plot_of(draw(curves))
    columns = [index for index, letter in enumerate(rows[0]) if letter in BRAILLE]
    assert len(columns) == 1
    assert all(row.ljust(80)[columns[0]] in BRAILLE for row in rows)


def test_several_curves() -> None:
    """Each has its colour in a terminal, its marker elsewhere, and a place in the legend."""
    curves = {"a": one([1.0, 1.0])["loss"], "b": one([5.0, 5.0])["loss"]}
    plain = draw(curves)
    assert "* a   + b" in plain and not BRAILLE & set(plain)
    rows = plot_of(plain)
    assert "+" in rows[0] and "*" in rows[-1]
    coloured = draw(curves, coloured=True)
    assert "\x1b[36m──" in coloured and "\x1b[33m──" in coloured and BRAILLE & set(coloured)


def test_an_encoding_without_dots_gets_plain_characters() -> None:
    """Everything is drawn in ASCII."""
    text = draw(one([3.0, 2.0, 1.0]), encoding="ascii")
    assert text.isascii() and text.count("*") > 20


def test_a_log_axis() -> None:
    """Powers of ten are equally far apart; what is not positive is counted."""
    text = draw(one([1000.0, 100.0, 10.0, 1.0, 0.0]), log=True)
    labels = [line.split("┤")[0].strip() if "┤" in line else "" for line in text.splitlines()[1:11]]
    assert labels == ["1k", "", "", "100", "", "", "10", "", "", "1"]
    assert "loss: 1 of 5 points are not finite, or not positive" in text
    assert "2┤" in draw(one([1.0, 3.0]), log=True)
    assert "1.02┤" in draw(one([1.0, 1.05]), log=True)


@pytest.mark.parametrize(
    "values",
    [[], [NAN], [INF, -INF], [1.0], [0.0], [2.0] * 5, [1e308, -1e308], [5e-324], [1e-320, 2e-320], [1.0, 1.0 + 1e-16],
     [1.04e-322, 5e-323], [3e-323]],
)  # fmt: skip
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("first", [1, 2**60, 2**63 - 10])
def test_any_numbers_are_drawn(values: list[float], log: bool, first: int) -> None:
    """No number raises, and what has nothing to draw says so."""
    text = draw(one(values, np.arange(first, first + len(values))), log=log)
    finite = [value for value in values if np.isfinite(value) and (value > 0 or not log)]
    assert ("no value to draw" in text) is (not finite)


def test_gaps() -> None:
    """Values that are not finite leave a gap and are counted."""
    values = np.ones(100)
    values[40:60] = NAN
    text = draw(one(values))
    row = next(row for row in plot_of(text) if row.strip())
    assert row[:20].strip() and not row[32:42].strip() and row[50:].strip()
    assert "loss: 20 of 100 points are not finite" in text


def test_labels_cannot_control_the_terminal() -> None:
    """Control characters are visible, and a long label is cut."""
    text = draw({"\x1b[31m\u202e\n" + "x" * 10_000: one([1.0])["loss"]})
    assert text.replace("\n", "").isprintable() and "\\x1b[31m" in text
    assert max(map(len, text.splitlines())) <= 80
