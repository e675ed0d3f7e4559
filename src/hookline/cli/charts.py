"""Draw curves in a terminal: braille dots, or plain characters where the encoding or the colors are missing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from hookline._console import can_encode, printable
from hookline.cli.formatting import MAX_WIDTH, bounded, heading, paragraph
from hookline.runs.curves import Curve

Numbers = NDArray[np.float64]

COLORS = ("cyan", "yellow", "magenta", "green", "red", "blue")
MARKERS = "*+ox#@"
MIN_POINTS = 5  # With fewer points, the table of metrics says more than an unrequested chart.
_MIN_WIDTH = 10  # columns of the plot, even in a terminal that is too narrow for it
_ROWS_PER_TICK, _COLUMNS_PER_TICK = 2, 10  # at least
_MAX_DRAWN, _MIN_DRAWN = 1e300, 1e-300  # larger values are drawn there; smaller ones are 0, or there on a log axis
_ROUNDING = 1e-12  # numbers that differ by a smaller share count as equal
_MAX_LABEL_LENGTH = 60  # characters of the legend
# The bit of each dot in a braille character, by row and column; U+2800 has no dot.
_BRAILLE, _BITS = 0x2800, np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]], dtype=np.uint32)
_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def draw_chart(
    console: Console, curves: Mapping[str, Curve | None], *, title: str, height: int = 10, log: bool = False
) -> None:
    """Overlay curves in a chart as wide as the terminal, with both axes and a legend.

    Values that are not finite leave a gap, and a line below the chart counts them.

    Args:
        console: Where to print. Without colors, several curves are drawn with a marker each.
        curves: By label. A range of steps is drawn as a vertical line, so that spikes inside it stay visible. None
            keeps the color and the marker of its place, so that a run looks the same in charts of metrics that others
            lack.
        title: The title of the chart.
        height: Rows of the plot.
        log: Whether the axis of values is logarithmic; values that are not positive leave a gap.
    """
    heading(console, bounded(title, 200))
    series = [
        _Series.make(label, index, curve, log)
        for index, (label, curve) in enumerate(curves.items())
        if curve is not None
    ]
    drawn = [curve for curve in series if curve.steps.size]
    if drawn:
        _draw(console, drawn, max(height, 2), log, with_markers=len(curves) > 1)
    else:
        paragraph(console, "no value to draw")
    for curve in series:
        if curve.left_out:
            paragraph(console, f"{_shorten(curve.label)}: {curve.left_out}", hanging=2)


@dataclass
class _Series:
    """A curve whose values can be drawn, sorted by step; for a logarithmic axis, their logarithms."""

    label: str
    index: int  # The index of its color and marker.
    steps: Numbers
    low: Numbers
    high: Numbers
    runs: Numbers  # a number per point; points with different numbers have a gap between them
    left_out: str  # what is not drawn, in words

    @classmethod
    def make(cls, label: str, index: int, curve: Curve, log: bool) -> _Series:
        # Near the largest float, differences would overflow.
        low, high = (np.clip(side, -_MAX_DRAWN, _MAX_DRAWN) for side in (curve.lowest, curve.highest))
        if log:
            low, high = (np.where(side > 0, np.log10(np.maximum(side, _MIN_DRAWN)), np.nan) for side in (low, high))
            low = np.where(np.isnan(low), high, low)  # The range has values on both sides of 0.
        else:
            # Between subnormal numbers there may be no room for ticks.
            low, high = (np.where(np.abs(side) < _MIN_DRAWN, 0.0, side) for side in (low, high))
        there = np.isfinite(high)
        runs = np.cumsum(~there).astype(np.float64)
        steps = curve.steps.astype(np.float64)
        left_out = _left_out(curve, int((~there).sum()), log)
        return cls(label, index, steps[there], low[there], high[there], runs[there], left_out)


def _left_out(curve: Curve, gaps: int, log: bool) -> str:
    """Say how many of the values or ranges of a curve leave a gap."""
    if not log:
        return f"{curve.non_finite[1]:,} of {curve.points:,} points are not finite" if curve.non_finite else ""
    if not gaps:
        return ""
    if curve.width == 1:
        return f"{gaps:,} of {curve.points:,} points are not finite, or not positive"
    return f"{gaps:,} of {curve.steps.size:,} ranges of steps have no finite, positive value"


def _draw(console: Console, series: Sequence[_Series], height: int, log: bool, with_markers: bool) -> None:
    colored = console.color_system is not None and not console.no_color
    has_dots = can_encode("⣿│┤└─┬…", console)
    with_dots = has_dots and (colored or not with_markers)
    bottom, top = _limits([value for curve in series for value in (curve.low, curve.high)])
    if top == bottom:
        room = 0.05 if log else abs(top) / 10 or 1.0
        bottom, top = bottom - room, top + room
    first, last = _limits([curve.steps for curve in series])
    last = max(last, first + max(1.0, abs(first) * _ROUNDING))  # beyond 2^53, adding 1 changes nothing
    labels = _value_labels(bottom, top, height, log)
    margin = max(len(text) for text in ("step", *labels.values())) + 1
    columns = max(min(console.width, MAX_WIDTH) - margin - 1, _MIN_WIDTH)
    shape = (height * 4, columns * 2) if with_dots else (height, columns)
    bits, owners = np.zeros((height, columns), dtype=np.uint32), np.full((height, columns), -1)
    for curve in series:
        pixels = _rasterize(curve, shape, (first, last), (bottom, top))
        if with_dots:
            cells = pixels.reshape(height, 4, columns, 2)
            dots = np.where(cells, _BITS[None, :, None, :], 0).sum(axis=(1, 3)).astype(np.uint32)
            bits |= dots
            owners[dots > 0] = curve.index
        else:
            owners[pixels] = curve.index
    frame = "┤│└─┬" if has_dots else "+|+-+"
    for row in range(height):
        edge = f"{labels.get(row, ''):>{margin}}{frame[0] if row in labels else frame[1]}"
        line = Text().append(edge, "dim")  # not the style of the whole line
        for column in range(columns):
            owner = int(owners[row, column])
            if owner < 0:
                line.append(" ")
            elif with_dots:
                line.append(chr(_BRAILLE + int(bits[row, column])), COLORS[owner % len(COLORS)])
            else:
                line.append(MARKERS[owner % len(MARKERS)], COLORS[owner % len(COLORS)])
        _print(console, line)
    ticks, names = _step_axis(first, last, columns, frame)
    _print(console, Text(f"{' ' * margin}{frame[2]}{ticks}", "dim"))
    _print(console, Text(f"{'step':>{margin}} {names}", "dim"))
    _print_legend(console, series, margin + 1, "─" if with_dots else "")


def _rasterize(curve: _Series, shape: tuple[int, int], steps: tuple[float, float], values: tuple[float, float]) -> Any:
    """Return which pixels [rows, columns] a curve covers; row 0 is at the top."""
    rows, columns = shape
    across = (curve.steps - steps[0]) / (steps[1] - steps[0]) * (columns - 1)
    low, high = (
        np.clip((side - values[0]) / (values[1] - values[0]), 0, 1) * (rows - 1) for side in (curve.low, curve.high)
    )
    low, high = np.minimum(low, high), np.maximum(low, high)
    covered = np.zeros(shape, dtype=bool)
    breaks = np.flatnonzero(np.diff(curve.runs)) + 1
    for part in np.split(np.arange(len(across)), breaks):
        x = np.rint(across[part]).astype(int)
        start, end = x[0], x[-1] + 1
        # Between two points the curve is a straight line; at a point the column covers everything that happened there.
        least, most = (np.interp(np.arange(start, end), across[part], side[part]) for side in (low, high))
        np.minimum.at(least, x - start, low[part])
        np.maximum.at(most, x - start, high[part])
        least, most = np.rint(least).astype(int), np.rint(most).astype(int)
        # A steep line leaves gaps between neighboring columns, which the right one fills.
        below, above = least.copy(), most.copy()
        least[1:] = np.where(below[1:] > above[:-1] + 1, above[:-1] + 1, below[1:])
        most[1:] = np.where(above[1:] < below[:-1] - 1, below[:-1] - 1, above[1:])
        height = np.arange(rows)[:, None]
        covered[:, start:end] |= (height >= least) & (height <= most)
    return covered[::-1]


# ---- axes ------------------------------------------------------------------------------------------------------------


def _limits(arrays: Sequence[Numbers]) -> tuple[float, float]:
    """Return the least and the greatest finite number; the same number twice if they differ only by rounding."""
    finite = np.concatenate(arrays)
    finite = finite[np.isfinite(finite)]
    least, most = float(finite.min()), float(finite.max())
    return (least, least) if most - least <= _ROUNDING * max(abs(least), abs(most)) else (least, most)


def _round_step(span: float, count: int) -> float:
    """Return the distance between ticks: 1, 2 or 5 times a power of ten, so that there are at most `count`."""
    rough = span / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= rough * 0.999), 10 * power)


def _ticks(least: float, most: float, count: int, at_least: float = 0.0) -> tuple[list[float], float]:
    """Return round numbers between two limits, and the distance between them."""
    step = max(_round_step(most - least, count), at_least)
    begin, end = math.ceil(least / step - 1e-9), math.floor(most / step + 1e-9)
    return [number * step for number in range(begin, end + 1)], step


def _value_labels(bottom: float, top: float, height: int, log: bool) -> dict[int, str]:
    """Return the labels of the value axis, by row."""
    count = max(height // _ROWS_PER_TICK, 2)
    if log:
        texts = _log_ticks(bottom, top, count)
    else:
        ticks, step = _ticks(bottom, top, count)
        texts = {tick: _format_value(tick, step) for tick in ticks}
    return {round((1 - (tick - bottom) / (top - bottom)) * (height - 1)): text for tick, text in texts.items()}


def _log_ticks(bottom: float, top: float, count: int) -> dict[float, str]:
    """Return the logarithms of round numbers and their labels: powers of ten, with 2 and 5 if there are few of them."""
    if top - bottom >= 2:
        ticks, _ = _ticks(bottom, top, count, at_least=1.0)
        return {tick: _format_value(10**tick, 10**tick) for tick in ticks}
    digits = [(digit, power) for power in range(math.floor(bottom), math.ceil(top) + 1) for digit in (1, 2, 5)]
    labels = {math.log10(digit) + power: _format_value(digit * 10.0**power, 10.0**power) for digit, power in digits}
    labels = {tick: text for tick, text in labels.items() if bottom <= tick <= top}
    if len(labels) > 1:
        return labels
    values, step = _ticks(10**bottom, 10**top, count)  # over such a short distance the axis is nearly linear
    return {math.log10(value): _format_value(value, step) for value in values if value > 0}


def _format_value(value: float, step: float) -> str:
    """Return a number with enough digits to distinguish it from the next one, `step` away.

    >>> _format_value(0.25, 0.05), _format_value(2e-05, 1e-05), _format_value(1500.0, 500.0), _format_value(2e6, 1e6)
    ('0.25', '2e-05', '1500', '2M')
    """
    if abs(value) < step / 1e6:
        return "0"
    size = max(abs(value), step)
    if size < 1e-3 or size >= 1e15:
        digits = max(math.floor(math.log10(abs(value))) - math.floor(math.log10(step) + 1e-9), 0)
        return f"{value:.{digits}e}"
    scale, suffix = next(((scale, suffix) for scale, suffix in _SUFFIXES if max(size / 10, step) >= scale), (1.0, ""))
    digits = max(-math.floor(math.log10(step / scale) + 1e-9), 0)
    return f"{value / scale:.{digits}f}{suffix}"


def _step_axis(first: float, last: float, columns: int, frame: str) -> tuple[str, str]:
    """Return the line below the plot, and the steps below that."""
    count = max(columns // _COLUMNS_PER_TICK, 2)
    ticks, step = _ticks(first, last, count, at_least=1.0)
    line, names = [frame[3]] * columns, [" "] * columns
    free = 0
    for tick in ticks:
        column = round((tick - first) / (last - first) * (columns - 1))
        text = _format_value(tick, step)
        begin = min(max(column - len(text) // 2, 0), columns - len(text))
        line[column] = frame[4]
        if begin >= free:
            names[begin : begin + len(text)] = text
            free = begin + len(text) + 1
    return "".join(line), "".join(names)


# ---- text ------------------------------------------------------------------------------------------------------------


def _print_legend(console: Console, series: Sequence[_Series], indent: int, line: str) -> None:
    """Print which curve each color or marker stands for, as many as fit on a line."""
    width = max(min(console.width, MAX_WIDTH), 20)
    shown = Text(" " * indent)
    for curve in series:
        sign = line * 2 or MARKERS[curve.index % len(MARKERS)]
        entry = Text.assemble((sign, COLORS[curve.index % len(COLORS)]), f" {_shorten(curve.label)}")
        if shown.cell_len > indent and shown.cell_len + 3 + entry.cell_len > width:
            _print(console, shown)
            shown = Text(" " * indent)
        shown.append("   " if shown.cell_len > indent else "").append_text(entry)
    _print(console, shown)


def _shorten(label: str) -> str:
    """Return a label on one line, safe to print, of bounded length."""
    return bounded(" ".join(printable(label[: 2 * _MAX_LABEL_LENGTH]).split()) or "(no name)", _MAX_LABEL_LENGTH)


def _print(console: Console, line: Text) -> None:
    line.rstrip()
    line.truncate(min(console.width, MAX_WIDTH), overflow="ellipsis")
    console.print(line, no_wrap=True, crop=False, soft_wrap=True)
