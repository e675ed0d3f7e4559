"""Mean and standard deviation of one tensor, without leaving its device."""

from __future__ import annotations

import torch

from hookline.stats.columns import MEAN, STD
from hookline.stats.statistics import summarize


def mean_and_std(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `torch.mean` and `torch.std` have them, in at least float32; of a single element, std is 0."""
    row = summarize([tensor])[0].to(torch.float64 if tensor.dtype is torch.float64 else torch.float32)
    return row[MEAN], row[STD]
