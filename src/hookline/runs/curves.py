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
        self.points = 0
        """How many values there are."""
        self.last: Point | None = None
        """The value at the latest step; NaN or infinite if that is what it was."""
        self.least: Point | None = None
        """The lowest finite value and where it was first."""
        self.greatest: Point | None = None
        """The highest finite value and where it was first."""
        self.non_finite: tuple[int, int] | None = None
        """The first step with a value that is NaN or infinite, and how many such values there are."""
        self.steps: Steps = np.empty(0, np.int64)
        """The first step of each range."""
        # The lowest, the highest, the sum and the number of the finite values, and the step of the highest.
        self._data: Values = np.empty((5, 0))

    @property
    def lowest(self) -> Values:
        """The lowest finite value of each range; NaN where there is none."""
        row: Values = self._data[0]
        return row

    @property
    def highest(self) -> Values:
        """The highest finite value of each range; NaN where there is none."""
        row: Values = self._data[1]
        return row

    @property
    def highest_at(self) -> Steps:
        """The step of the highest value of each range; the first of several."""
        steps: Steps = self._data[4].astype(np.int64)
        return steps

    @property
    def mean(self) -> Values:
        """The mean of the finite values of each range; NaN where there is none."""
        with np.errstate(invalid="ignore"):
            means: Values = self._data[2] / self._data[3]  # 0 / 0 is NaN
        return means

    @property
    def average(self) -> float | None:
        """The mean of all finite values; None if there is none."""
        return float(self._data[2].sum()) / self.finite if self.finite else None

    @property
    def finite(self) -> int:
        """How many values are finite."""
        return int(self._data[3].sum())

    def extend(self, steps: Sequence[int], values: Sequence[Any]) -> None:
        """Add values, faster if there are many; the strings that stand for non-finite numbers are numbers, too."""
        new_steps, numbers = as_arrays(steps, values)
        if new_steps.size:
            self._add(*sort_by_step(new_steps, numbers))

    def _add(self, steps: Steps, values: Values) -> None:
        """Move values, in the order of their steps, into the ranges."""
        finite = np.isfinite(values)
        self.points += steps.size
        if self.last is None or steps[-1] >= self.last.step:
            self.last = Point(int(steps[-1]), float(values[-1]))
        is_new = self.steps.size == 0 or steps[0] > self.steps[-1] + self.width - 1
        if self.width == 1 and not is_new:
            replaced = np.isin(self.steps, steps)
            self.points -= int(replaced.sum())
            self._select(~replaced)
        shown = np.where(finite, values, np.nan)
        self.steps = np.concatenate([self.steps, steps - steps % self.width])
        self._data = np.hstack([self._data, [shown, shown, np.where(finite, values, 0.0), finite, steps]])
        if not is_new:
            self._select(np.argsort(self.steps, kind="stable"))
        if self.width == 1:
            # A value that was replaced must not stay the lowest or highest one, so these come from what is left.
            self.least = self.greatest = self.non_finite = None
            steps, values, finite = self.steps, self._data[0], self._data[3] > 0
        self._note_extremes(steps, values, finite)
        self._merge_ranges()
        while self.steps.size > MAX_RANGES:
            self.width *= 2
            self.steps = self.steps - self.steps % self.width
            self._merge_ranges()

    def _select(self, which: NDArray[Any]) -> None:
        self.steps, self._data = self.steps[which], self._data[:, which]

    def _merge_ranges(self) -> None:
        """Merge entries of the same range, which are neighbours."""
        is_first = np.append(True, self.steps[1:] != self.steps[:-1])
        if is_first.all():
            return
        begins, merge = np.flatnonzero(is_first), (np.fmin, np.fmax, np.add, np.add)
        with np.errstate(over="ignore", invalid="ignore"):  # sums of values near the largest float
            merged = [function.reduceat(row, begins) for function, row in zip(merge, self._data[:4], strict=True)]
        is_highest = self._data[1] == merged[1][np.cumsum(is_first) - 1]
        at = np.fmin.reduceat(np.where(is_highest, self._data[4], np.inf), begins)
        self.steps = self.steps[begins]
        at = np.where(np.isfinite(at), at, self.steps)  # of a range without a finite value
        self._data = np.array([*merged, at])

    def _note_extremes(self, steps: Steps, values: Values, finite: NDArray[np.bool_]) -> None:
        """Update the extremes and the count of values that are not finite, with values in the order of their steps."""
        if not finite.all():
            first, count = int(steps[~finite][0]), int((~finite).sum())
            before = self.non_finite
            self.non_finite = (first, count) if before is None else (min(before[0], first), before[1] + count)
            steps, values = steps[finite], values[finite]
        if steps.size:
            low, high = values.argmin(), values.argmax()
            if self.least is None or values[low] < self.least.value:
                self.least = Point(int(steps[low]), float(values[low]))
            if self.greatest is None or values[high] > self.greatest.value:
                self.greatest = Point(int(steps[high]), float(values[high]))


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
