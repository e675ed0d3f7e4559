"""The bins of histograms: signed, logarithmic, 8, 4, 2 or 1 per octave; what counts in them and where they end.

A histogram has a range of 31 octaves, which ends with the octave `top`. Its bins are in the order of the values; with
512 of them, eight per octave:

    0        -inf
    1…254    negative, from the largest magnitude to the smallest
    255      zero
    256…509  positive, from the smallest magnitude to the largest
    510      +inf
    511      NaN

Values below the range count in the smallest bin of their sign. Needs NumPy, but not torch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BINS, PER_OCTAVE = 512, 8
PER_SIGN = (BINS - 4) // 2
FEWEST_BINS = 6  # one of each sign, zero, the infinities and NaN

Doubles = NDArray[np.float64]


def bins_per_sign(bins: int) -> int:
    """Return how many bins of each sign a histogram has that may have been folded to fewer bins."""
    return (bins - 4) // 2


def bins_per_octave(bins: int) -> int:
    """Return how many bins an octave of a histogram has."""
    return max(round(bins_per_sign(bins) * PER_OCTAVE / PER_SIGN), 1)


def bin_edges(bins: int, top: float) -> tuple[Doubles, Doubles]:
    """Return the low and the high end of every bin of a histogram.

    Both are 0 for the bin of zeros, infinite for the bins of infinities, and NaN for the bin of NaN. The smallest bin
    of each sign reaches to 0, because smaller values count there.

    Args:
        bins: How many there are: 512, or fewer if they were folded.
        top: The octave in which they end.
    """
    per_sign = bins_per_sign(bins)
    # These are the high ends of magnitudes, from the largest down.
    ends = np.exp2(top + 1 - np.arange(per_sign) / bins_per_octave(bins))
    low = np.concatenate([[-np.inf], -ends, [0.0, 0.0], ends[:0:-1], [np.inf, np.nan]])
    high = np.concatenate([[-np.inf], -ends[1:], [0.0, 0.0], ends[::-1], [np.inf, np.nan]])
    return low, high
