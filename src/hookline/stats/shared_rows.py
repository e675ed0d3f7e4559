"""Merge the statistics of a step over the ranks: the rows that they have measured in their batches become one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hookline.core.shared_part import SharedPart, Sizes
from hookline.stats.collector import SentRows, StepRows
from hookline.stats.columns import ABSMAX, L2, MAX, MEAN, MIN, STATISTICS, STD
from hookline.stats.histograms import BINS, USUAL_TOP, move_windows
from hookline.stats.merge import join_rows, split_rows

_SCALED = (MEAN, STD, MIN, MAX, ABSMAX, L2)
_PEAKS, _SUMS = 2, 8  # what `split_rows` makes of a row
_NONE = float("-inf")  # the maximum of nothing

Use = Callable[[StepRows], Mapping[str, float]]
"""Gets the rows of all ranks, and returns metrics to record at their step."""


def share_rows(
    kind: str,
    epoch: int,
    sent: SentRows,
    *,
    with_histograms: bool,
    is_copy: Callable[[Any], bool],
    scale: float = 1.0,
    use: Use,
) -> SharedPart:
    """Return the statistics rows of a step on this rank, as the record's exchange takes them.

    Each key has the numbers that `split_rows` makes of its row, and whether it has a row. Histograms are moved to the
    highest window of all ranks before they are added up.

    Args:
        kind: What the rows are; the same on all ranks.
        epoch: The epoch of the step.
        sent: The rows, which may still be on their way to the host.
        with_histograms: Whether rows carry a histogram behind their statistics.
        is_copy: Returns whether a key's tensor on this rank is a copy of one that counts on another rank.
        scale: What the values of the merged rows are multiplied by.
        use: Called with the merged rows, on all ranks.
    """
    width = (_PEAKS + 1, _SUMS + 1 + BINS) if with_histograms else (_PEAKS, _SUMS + 1)
    own = dict.fromkeys(map(str, sent.keys), width)
    copies = {str(key) for key in sent.keys if is_copy(key)}
    columns = len(STATISTICS) + (BINS + 1) * with_histograms
    read = cache(lambda: _read(sent, list(own), copies, columns))

    def maxima() -> Tensor:
        """Wait for the rows, and return the extremes of each and the octave in which its histogram ends."""
        rows, _ = read()
        _, peaks = split_rows(rows[:, : len(STATISTICS)])
        if with_histograms:
            filled = rows[:, len(STATISTICS) : -1].sum(1) > 0
            peaks = torch.cat([peaks, torch.where(filled, rows[:, -1], _NONE).unsqueeze(1)], dim=1)
        return peaks.reshape(-1)

    def sums(maxima: Tensor) -> Tensor:
        """Return the sums of each row, whether it is there, and its histogram."""
        rows, present = read()
        parts = [split_rows(rows[:, : len(STATISTICS)])[0], present.unsqueeze(1)]
        if with_histograms:
            counts, tops = rows[:, len(STATISTICS) : -1], rows[:, -1]
            parts.append(move_windows(counts, tops, maxima.reshape(-1, _PEAKS + 1)[:, -1]))
        return torch.cat(parts, dim=1).reshape(-1)

    def finish(sizes: Sizes, maxima: Tensor, sums: Tensor) -> Mapping[str, float]:
        """Make the rows of all ranks, and use them."""
        peaks, totals = maxima.reshape(-1, width[0]), sums.reshape(-1, width[1])
        rows = join_rows(totals[:, :_SUMS], peaks[:, :_PEAKS])
        rows[:, _SCALED] *= scale
        if with_histograms:
            top = torch.where(peaks[:, -1].isfinite(), peaks[:, -1], USUAL_TOP)
            shift = torch.tensor(scale, dtype=torch.float64).log2()
            rows = torch.cat([rows, totals[:, _SUMS + 1 :], (top + shift).unsqueeze(1)], dim=1)
        present = totals[:, _SUMS] > 0
        names = [name for name, has_row in zip(sizes, present.tolist(), strict=True) if has_row]
        return use(StepRows(sent.step, names, rows[present]))

    return SharedPart(kind, sent.step, epoch, own, finish, maxima, sums)


def _read(sent: SentRows, names: Sequence[str], copies: Collection[str], columns: int) -> tuple[Tensor, Tensor]:
    """Return a row for each name, and 1 for those that have one: the others count for nothing."""
    found = sent.read()
    keys = list(map(str, found.keys))
    if keys == names and not copies:  # nearly always
        return found.rows.double(), torch.ones(len(names), dtype=torch.float64)
    rows = torch.zeros(len(names), columns, dtype=torch.float64)
    present = torch.zeros(len(names), dtype=torch.float64)
    counted = [index for index, key in enumerate(keys) if key not in copies]
    places = [names.index(keys[index]) for index in counted]
    rows[places], present[places] = found.rows[counted].double(), 1.0
    return rows, present
