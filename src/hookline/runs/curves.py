"""Keep the course of a number over a run in bounded memory: lowest, highest and mean of equally wide ranges of steps.

A spike stays visible however long the run is, because each range keeps its extremes. As long as there are few points,
every range is one step and the values are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookline.record.json_lines import as_number

Steps = NDArray[np.int64]
Values = NDArray[np.float64]

MAX_RANGES = 800  # of a curve: about as many as a plot has pixels
_MAX_PENDING = 256  # values that are summarized together, which is faster than one by one


@dataclass(frozen=True)
class Point:
    """The value of a curve at a step."""

    step: int
    value: float


class Curve:
    """The course of one number: arrays with one entry per range of `width` steps, and its most important points.

    Values may arrive in any order. While `width` is 1, a later value of a step replaces an earlier one.
    """

    def __init__(self) -> None:
        self.width = 1
        self._points = 0
        self._last: Point | None = None
        self._least: Point | None = None
        self._greatest: Point | None = None
        self._non_finite: tuple[int, int] | None = None
        self._starts: Steps = np.empty(0, np.int64)
        # The lowest, the highest, the sum and the number of the finite values, and the step of the highest.
        self._data: Values = np.empty((5, 0))
        self._pending_steps: list[int] = []
        self._pending_values: list[Any] = []

    def extend(self, steps: Sequence[int], values: Sequence[Any]) -> None:
        """Add many values; the strings that stand for non-finite numbers in a record are numbers, too."""
        self._pending_steps.extend(steps)
        self._pending_values.extend(values)
        if len(self._pending_steps) >= _MAX_PENDING:
            self._summarize()

    # ---- what the curve is -------------------------------------------------------------------------------------------

    @property
    def steps(self) -> Steps:
        """The first step of each range."""
        self._summarize()
        return self._starts

    @property
    def lowest(self) -> Values:
        """The lowest finite value of each range; NaN where there is none."""
        return self._row(0)

    @property
    def highest(self) -> Values:
        """The highest finite value of each range; NaN where there is none."""
        return self._row(1)

    @property
    def highest_at(self) -> Steps:
        """The step of the highest value of each range; the first of several."""
        return self._row(4).astype(np.int64)

    @property
    def mean(self) -> Values:
        """The mean of the finite values of each range; NaN where there is none."""
        sums, counts = self._row(2), self._row(3)
        with np.errstate(invalid="ignore"):
            means: Values = sums / counts  # 0 / 0 is NaN
        return means

    @property
    def average(self) -> float | None:
        """The mean of all finite values; None if there is none."""
        return float(self._row(2).sum()) / self.finite if self.finite else None

    @property
    def finite(self) -> int:
        """How many values are finite."""
        return int(self._row(3).sum())

    @property
    def points(self) -> int:
        """How many values there are."""
        self._summarize()
        return self._points

    @property
    def last(self) -> Point | None:
        """The value at the latest step; NaN or infinite if that is what it was."""
        self._summarize()
        return self._last

    @property
    def least(self) -> Point | None:
        """The lowest finite value and where it was first."""
        self._summarize()
        return self._least

    @property
    def greatest(self) -> Point | None:
        """The highest finite value and where it was first."""
        self._summarize()
        return self._greatest

    @property
    def non_finite(self) -> tuple[int, int] | None:
        """The first step with a value that is NaN or infinite, and how many such values there are."""
        self._summarize()
        return self._non_finite

    # ---- summarizing -------------------------------------------------------------------------------------------------

    def _summarize(self) -> None:
        """Move the values that have arrived since the last call into the ranges."""
        if not self._pending_steps:
            return
        steps, values = as_arrays(self._pending_steps, self._pending_values)
        self._pending_steps, self._pending_values = [], []
        if not steps.size:
            return
        steps, values = sort_by_step(steps, values)
        finite = np.isfinite(values)
        self._points += steps.size
        if self._last is None or steps[-1] >= self._last.step:
            self._last = Point(int(steps[-1]), float(values[-1]))
        is_new = self._starts.size == 0 or steps[0] > self._starts[-1] + self.width - 1
        if self.width == 1 and not is_new:
            replaced = np.isin(self._starts, steps)
            self._points -= int(replaced.sum())
            self._select(~replaced)
        shown = np.where(finite, values, np.nan)
        self._starts = np.concatenate([self._starts, steps - steps % self.width])
        self._data = np.hstack([self._data, [shown, shown, np.where(finite, values, 0.0), finite, steps]])
        if not is_new:
            self._select(np.argsort(self._starts, kind="stable"))
        if self.width == 1:
            # A value that was replaced must not stay the lowest or highest one, so these come from what is left.
            self._least = self._greatest = self._non_finite = None
            steps, values, finite = self._starts, self._data[0], self._data[3] > 0
        self._note_extremes(steps, values, finite)
        self._merge_ranges()
        while self._starts.size > MAX_RANGES:
            self.width *= 2
            self._starts = self._starts - self._starts % self.width
            self._merge_ranges()

    def _row(self, index: int) -> Values:
        self._summarize()
        row: Values = self._data[index]
        return row

    def _select(self, which: NDArray[Any]) -> None:
        self._starts, self._data = self._starts[which], self._data[:, which]

    def _merge_ranges(self) -> None:
        """Merge entries of the same range, which are neighbours."""
        is_first = np.append(True, self._starts[1:] != self._starts[:-1])
        if is_first.all():
            return
        begins, merge = np.flatnonzero(is_first), (np.fmin, np.fmax, np.add, np.add)
        with np.errstate(over="ignore", invalid="ignore"):  # sums of values near the largest float
            merged = [function.reduceat(row, begins) for function, row in zip(merge, self._data[:4], strict=True)]
        is_highest = self._data[1] == merged[1][np.cumsum(is_first) - 1]
        at = np.fmin.reduceat(np.where(is_highest, self._data[4], np.inf), begins)
        self._starts = self._starts[begins]
        at = np.where(np.isfinite(at), at, self._starts)  # of a range without a finite value
        self._data = np.array([*merged, at])

    def _note_extremes(self, steps: Steps, values: Values, finite: NDArray[np.bool_]) -> None:
        """Update the extremes and the count of values that are not finite, with values in the order of their steps."""
        if not finite.all():
            first, count = int(steps[~finite][0]), int((~finite).sum())
            before = self._non_finite
            self._non_finite = (first, count) if before is None else (min(before[0], first), before[1] + count)
            steps, values = steps[finite], values[finite]
        if steps.size:
            low, high = values.argmin(), values.argmax()
            if self._least is None or values[low] < self._least.value:
                self._least = Point(int(steps[low]), float(values[low]))
            if self._greatest is None or values[high] > self._greatest.value:
                self._greatest = Point(int(steps[high]), float(values[high]))


def sort_by_step(steps: Steps, values: Values) -> tuple[Steps, Values]:
    """Return values in the order of their steps, and of each step the last one."""
    if not (steps[1:] <= steps[:-1]).any():
        return steps, values
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    is_latest = np.append(steps[1:] != steps[:-1], True)
    return steps[is_latest], values[is_latest]


def as_arrays(steps: Sequence[int], values: Sequence[Any]) -> tuple[Steps, Values]:
    """Return arrays without the values that are not numbers, which only a damaged or foreign record has."""
    # NumPy would also convert texts such as "12", and None to NaN.
    if set(map(type, values)) <= {int, float}:
        with suppress(OverflowError):  # an integer that no float holds
            return np.array(steps, np.int64), np.array(values, np.float64)
    numbers = zip(steps, map(as_number, values), strict=True)
    kept = [(step, number) for step, number in numbers if number is not None]
    return np.array([step for step, _ in kept], np.int64), np.array([number for _, number in kept], np.float64)
