"""Bring the statistics of a step together over the ranks: what each has measured in its batch becomes one row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hookline.core.shared_part import Sizes
from hookline.stats.collector import SentRows, StepRows
from hookline.stats.columns import ABSMAX, L2, MAX, MEAN, MIN, STATISTICS, STD
from hookline.stats.histograms import BINS, USUAL_TOP, move_windows
from hookline.stats.merge import join_rows, split_rows

_SCALED = (MEAN, STD, MIN, MAX, ABSMAX, L2)
_PEAKS, _SUMS = 2, 8  # what `split_rows` makes of a row
_NONE = float("-inf")  # the maximum of nothing

Use = Callable[[StepRows], Mapping[str, float]]
"""Gets the rows of all ranks, and returns metrics to record at their step."""


class SharedRows:
    """The statistics rows of a step on this rank, as the record's exchange takes them (`SharedPart`).

    For each key it gives what `split_rows` makes of its row, and whether it has one. Histograms are moved to the
    highest window of all ranks before they are added up.

    Args:
        key: What the rows are; the same on all ranks.
        epoch: The epoch of the step.
        sent: The rows, which may still be on their way to the host.
        with_histograms: Whether rows carry a histogram behind their statistics.
        is_copy: Returns whether a key's tensor on this rank is a copy of one that counts on another rank.
        scale: What the values of the merged rows are multiplied by.
        use: Called with the merged rows, on all ranks.
    """

    def __init__(
        self,
        key: str,
        epoch: int,
        sent: SentRows,
        *,
        with_histograms: bool,
        is_copy: Callable[[Any], bool],
        scale: float = 1.0,
        use: Use,
    ) -> None:
        self.key, self.step, self.epoch = f"{key} {sent.step}", sent.step, epoch
        size = (_PEAKS + 1, _SUMS + 1 + BINS) if with_histograms else (_PEAKS, _SUMS + 1)
        self.sizes: Sizes = dict.fromkeys(map(str, sent.keys), size)
        self._width, self._with_histograms, self._scale, self._use = size, with_histograms, scale, use
        self._sent: SentRows | None = sent
        self._copies = {str(key) for key in sent.keys if is_copy(key)}
        self._rows = self._present = torch.zeros(0)

    def maxima(self) -> Tensor:
        """Wait for the rows, and return the extremes of each and the octave in which its histogram ends."""
        if self._sent is not None:
            self._rows, self._present = self._read(self._sent)
            self._sent = None
        _, peaks = split_rows(self._rows[:, : len(STATISTICS)])
        if self._with_histograms:
            filled = self._rows[:, len(STATISTICS) : -1].sum(1) > 0
            peaks = torch.cat([peaks, torch.where(filled, self._rows[:, -1], _NONE).unsqueeze(1)], dim=1)
        return peaks.reshape(-1)

    def sums(self, maxima: Tensor) -> Tensor:
        """Return what adds up of each row, whether it is there, and its histogram."""
        sums, _ = split_rows(self._rows[:, : len(STATISTICS)])
        parts = [sums, self._present.unsqueeze(1)]
        if self._with_histograms:
            counts, tops = self._rows[:, len(STATISTICS) : -1], self._rows[:, -1]
            parts.append(move_windows(counts, tops, maxima.reshape(-1, _PEAKS + 1)[:, -1]))
        return torch.cat(parts, dim=1).reshape(-1)

    def finish(self, sizes: Sizes, maxima: Tensor, sums: Tensor) -> Mapping[str, float]:
        """Make the rows of all ranks, and use them."""
        peaks, totals = maxima.reshape(-1, self._width[0]), sums.reshape(-1, self._width[1])
        rows = join_rows(totals[:, :_SUMS], peaks[:, :_PEAKS])
        rows[:, _SCALED] *= self._scale
        if self._with_histograms:
            top = torch.where(peaks[:, -1].isfinite(), peaks[:, -1], USUAL_TOP)
            shift = torch.tensor(self._scale, dtype=torch.float64).log2()
            rows = torch.cat([rows, totals[:, _SUMS + 1 :], (top + shift).unsqueeze(1)], dim=1)
        present = totals[:, _SUMS] > 0
        names = [name for name, has_row in zip(sizes, present.tolist(), strict=True) if has_row]
        return self._use(StepRows(self.step, names, rows[present]))

    def _read(self, sent: SentRows) -> tuple[Tensor, Tensor]:
        """Return a row for each name, and 1 for those that have one: the others count for nothing."""
        found, names = sent.read(), list(self.sizes)
        keys = list(map(str, found.keys))
        if keys == names and not self._copies:  # nearly always
            return found.rows.double(), torch.ones(len(names), dtype=torch.float64)
        columns = len(STATISTICS) + (BINS + 1) * self._with_histograms
        rows = torch.zeros(len(names), columns, dtype=torch.float64)
        present = torch.zeros(len(names), dtype=torch.float64)
        counted = [index for index, key in enumerate(keys) if key not in self._copies]
        places = [names.index(keys[index]) for index in counted]
        rows[places], present[places] = found.rows[counted].double(), 1.0
        return rows, present
