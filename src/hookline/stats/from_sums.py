"""From what was added up of tensors on the CPU to their rows, for all of them at once."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np

from hookline.stats.columns import ABSMAX, COUNT, FAINT, FAR, L2, MAX, MEAN, MIN, STATISTICS, STD, ZEROS

Numbers = Any  # an array; its shape and dtype, which its own type would name, say nothing here


def rows_from_sums(sums: Numbers, sizes: Numbers) -> tuple[Numbers, list[int]]:
    """A row for each column of `sums`, and the places of those that must be measured again.

    The sums are total, sum of squares, minimum, maximum and how many elements are not zero. They are not enough for a
    tensor that is far from zero, faint or not finite. Nobody may mind if NumPy finds something invalid.
    """
    totals, squares, low, high, others = sums
    found = np.zeros((len(STATISTICS), len(totals)))
    found[COUNT], found[MIN], found[MAX] = sizes, low, high
    apart = np.divide(totals, sizes, out=found[MEAN]) * totals
    deviations = squares - apart
    np.sqrt(deviations / np.maximum(sizes - 1, 1), out=found[STD])
    np.maximum(-low, high, out=found[ABSMAX])
    np.sqrt(squares, out=found[L2])
    np.subtract(sizes, others, out=found[ZEROS])
    return found.T, _unsound(FAR * deviations - apart, sums)


def _unsound(nearness: Numbers, sums: Numbers) -> list[int]:
    """Mostly there are none, which three numbers tell; a NaN makes each comparison false."""
    _, squares, low, high, _ = sums
    lowest, highest = np.minimum.reduce, np.maximum.reduce
    if lowest(nearness) >= 0 and lowest(squares) > FAINT and highest(squares) < inf:
        return []
    sound = (nearness >= 0) & (squares < inf) & ((squares > FAINT) | (low == high))
    places: list[int] = np.flatnonzero(~sound).tolist()
    return places
