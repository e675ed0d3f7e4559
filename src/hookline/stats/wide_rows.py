"""Rows that carry a histogram behind their statistics, so that both travel and are merged together.

The columns: those of `STATISTICS`, then one for each bin, then the octave at which the bins end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hookline.stats.columns import STATISTICS
from hookline.stats.histogram_merging import merge_histograms
from hookline.stats.histograms import Histograms, histograms
from hookline.stats.merging import merge
from hookline.stats.statistics import summarize

NARROW = len(STATISTICS)


def measure_with_histograms(tensors: Sequence[Tensor], names: Sequence[object] | None = None) -> Tensor:
    """One wide row per tensor, on the tensors' device; nothing waits for it."""
    rows = summarize(tensors, names)
    counted = histograms(tensors, rows)
    return torch.cat([rows, counted.counts.to(rows.dtype), counted.tops.to(rows.dtype).unsqueeze(1)], dim=1)


def histograms_of(rows: Tensor) -> Histograms:
    """The histograms in wide rows."""
    return Histograms(rows[:, NARROW:-1].long(), rows[:, -1].float())


def merge_rows(parts: Tensor) -> Tensor:
    """The rows of wholes from those of their parts, [parts, wholes, columns], wide or not."""
    merged = merge(parts[..., :NARROW])
    if parts.shape[-1] == NARROW:
        return merged
    counts, tops = merge_histograms(parts[..., NARROW:-1], parts[..., -1])
    return torch.cat([merged, counts, tops.unsqueeze(-1)], dim=-1)
