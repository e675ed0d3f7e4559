"""Putting histograms together, although each has a window of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from hookline.stats.histograms import BINS, PER_OCTAVE, PER_SIGN, ZERO


def merge_histograms(counts: Tensor, tops: Tensor) -> tuple[Tensor, Tensor]:
    """The histograms of wholes from those of their parts: [parts, wholes, bins] and [parts, wholes] in.

    Windows end at whole octaves, so the bins of a lower one lie exactly on those of the highest and move without loss;
    only what falls out at the small end is counted in the smallest bin, as it would have been from the start.
    """
    filled = counts.sum(-1) > 0
    top = torch.where(filled, tops, float("-inf")).amax(0)
    top = torch.where(filled.any(0), top, tops[0])
    moved = torch.where(filled, (top - tops) * PER_OCTAVE, 0.0).long().clamp(max=PER_SIGN)
    merged = torch.zeros_like(counts[0])
    for part, bins in zip(counts, _moved_bins(moved), strict=True):
        merged.scatter_add_(-1, bins, part)
    return merged, top


def _moved_bins(moved: Tensor) -> Tensor:
    """Where each bin goes when the window ends so many bins higher, [parts, wholes, bins]."""
    bins = torch.arange(BINS, device=moved.device)
    negative, positive = (bins > 0) & (bins < ZERO), (bins > ZERO) & (bins <= 2 * PER_SIGN + 1)
    down = torch.minimum(bins + moved.unsqueeze(-1), torch.tensor(PER_SIGN, device=moved.device))
    up = torch.maximum(bins - moved.unsqueeze(-1), torch.tensor(ZERO + 1, device=moved.device))
    return torch.where(negative, down, torch.where(positive, up, bins))
