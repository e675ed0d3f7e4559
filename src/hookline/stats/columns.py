"""The columns of a statistics row, and the precision they are computed in.

To add a statistic, name it in `STATISTICS`, compute it in `torch_ops`, `cpu` and `kernels`, and merge it in `merge`.
"""

from __future__ import annotations

import torch

STATISTICS = ("count", "mean", "std", "min", "max", "absmax", "l2", "zeros", "nans", "infs")
"""The columns of every statistics row, in this order."""

COUNT, MEAN, STD, MIN, MAX, ABSMAX, L2, ZEROS, NANS, INFS = range(len(STATISTICS))

FAINT = 1e-24  # A smaller sum of squares has lost digits to the smallest numbers of float32.
FAR = 50.0  # Above this (mean / std)², squares are taken around the mean, which costs more passes over the data.


def row_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of rows: float64 counts exactly to 2^53, float32 only to 2^24, but MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: float32 if it holds every value of `dtype` exactly, else float64."""
    exact_in_float32 = dtype.itemsize < 4 or dtype is torch.float32
    return torch.float32 if exact_in_float32 else torch.float64
