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

MAX_RANGES = 800  # Points of a curve: about as many as a plot has pixels.


@dataclass(frozen=True)
class Point:
    """The value of a curve at a step."""

    step: int
    value: float


class Curve:
    """One number over time: arrays with one entry per range of `width` steps, and its most important points.

    Values may arrive in any order. While `width` is 1, a later value of a step replaces an earlier one.
    """

    def __init__(self) -> None:
        self.width = 1
        self.last: Point | None = None
        """The value at the latest step; NaN or infinite if it was."""
        self._keep(np.empty(0, np.int64), np.empty((8, 0)))

    def _keep(self, steps: Steps, data: Values) -> None:
        """Keep the first step of each range, and the rows of `data`, whose columns are the ranges."""
        self.steps, self._data = steps, data
        # The lowest and the highest finite value (NaN without one), the first step of each, and the sum.
        self.lowest, self.highest, self._lowest_at, self.highest_at, self._sums = data[:5]
        # The number of finite values and of others, and the first step of the latter.
        self._finite, self._non_finite, self._non_finite_at = data[5:]

    @property
    def points(self) -> int:
        """How many values there are."""
        return int((self._finite + self._non_finite).sum())

    @property
    def least(self) -> Point | None:
        """The lowest finite value and where it was first."""
        if not self.finite:
            return None
        place = np.nanargmin(self.lowest)
        return Point(int(self._lowest_at[place]), float(self.lowest[place]))

    @property
    def greatest(self) -> Point | None:
        """The highest finite value and where it was first."""
        if not self.finite:
            return None
        place = np.nanargmax(self.highest)
        return Point(int(self.highest_at[place]), float(self.highest[place]))

    @property
    def non_finite(self) -> tuple[int, int] | None:
        """The first step with a value that is NaN or infinite, and how many such values there are."""
        count = int(self._non_finite.sum())
        return (int(np.nanmin(self._non_finite_at)), count) if count else None

    @property
    def mean(self) -> Values:
        """The mean of the finite values of each range; NaN where there is none."""
        with np.errstate(invalid="ignore"):
            means: Values = self._sums / self._finite  # 0 / 0 is NaN
        return means

    @property
    def average(self) -> float | None:
        """The mean of all finite values; None if there is none."""
        return float(self._sums.sum()) / self.finite if self.finite else None

    @property
    def finite(self) -> int:
        """How many values are finite."""
        return int(self._finite.sum())

    def extend(self, steps: Sequence[int], values: Sequence[Any]) -> None:
        """Add values, faster if there are many; the strings that stand for non-finite numbers are numbers, too."""
        new_steps, numbers = sort_by_step(*as_arrays(steps, values))
        if not new_steps.size:
            return
        if self.last is None or new_steps[-1] >= self.last.step:
            self.last = Point(int(new_steps[-1]), float(numbers[-1]))
        if self.width == 1:
            kept = ~np.isin(self.steps, new_steps)
            self._keep(self.steps[kept], self._data[:, kept])
        finite = np.isfinite(numbers)
        shown, shown_at = np.where(finite, numbers, np.nan), np.where(finite, new_steps, np.nan)
        sums, others_at = np.where(finite, numbers, 0.0), np.where(finite, np.nan, new_steps)
        rows = [shown, shown, shown_at, shown_at, sums, finite, ~finite, others_at]
        merged = np.concatenate([self.steps, new_steps - new_steps % self.width])
        order = np.argsort(merged, kind="stable")
        self._keep(merged[order], np.hstack([self._data, rows])[:, order])
        self._merge_ranges()
        while self.steps.size > MAX_RANGES:
            self.width *= 2
            self.steps = self.steps - self.steps % self.width
            self._merge_ranges()

    def _merge_ranges(self) -> None:
        """Merge entries of the same range, which are neighbors."""
        is_first = np.append(True, self.steps[1:] != self.steps[:-1])
        if is_first.all():
            return
        begins, range_of = np.flatnonzero(is_first), np.cumsum(is_first) - 1
        with np.errstate(over="ignore", invalid="ignore"):  # sums of values near the largest float
            lowest, highest = np.fmin.reduceat(self.lowest, begins), np.fmax.reduceat(self.highest, begins)
            counts = np.add.reduceat([self._sums, self._finite, self._non_finite], begins, axis=1)
        lowest_at = np.where(self.lowest == lowest[range_of], self._lowest_at, np.nan)
        highest_at = np.where(self.highest == highest[range_of], self.highest_at, np.nan)
        places = np.fmin.reduceat([lowest_at, highest_at, self._non_finite_at], begins, axis=1)
        self._keep(self.steps[begins], np.array([lowest, highest, *places[:2], *counts, places[2]]))


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
    # NumPy would also convert strings such as "12", and None to NaN.
    if set(map(type, values)) <= {int, float}:
        with suppress(OverflowError):  # an integer that no float holds
            return np.array(steps, np.int64), np.array(values, np.float64)
    numbers = zip(steps, map(as_number, values), strict=True)
    kept = [(step, number) for step, number in numbers if number is not None]
    return np.array([step for step, _ in kept], np.int64), np.array([number for _, number in kept], np.float64)
