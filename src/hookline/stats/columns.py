"""What a row of statistics holds, and in which precision."""

from __future__ import annotations

import torch

STATISTICS = ("count", "mean", "std", "min", "max", "absmax", "l2", "zeros", "nans", "infs")
"""The columns of every row, in this order."""

COUNT, MEAN, STD, MIN, MAX, ABSMAX, L2, ZEROS, NANS, INFS = range(len(STATISTICS))

FAINT = 1e-24  # a sum of squares below has lost digits to float32's smallest numbers
FAR = 50.0  # (mean / std)²; beyond it the squares are taken around the mean, at the price of more passes


def row_dtype(device: torch.device) -> torch.dtype:
    """Rows are float64, which counts exactly to 2^53 where float32 stops at 2^24; MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision to compute in: float32 for what fits into it exactly, else float64."""
    exact_in_float32 = dtype.itemsize < 4 or dtype is torch.float32
    return torch.float32 if exact_in_float32 else torch.float64
