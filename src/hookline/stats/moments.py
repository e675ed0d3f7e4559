"""Mean and standard deviation, without leaving the device."""

from __future__ import annotations

import torch


def mean_and_std(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `torch.mean` and `torch.std` have them, in at least float32; two passes, so a large mean costs no digits."""
    wide = tensor.detach()
    if not wide.is_floating_point() or wide.element_size() < 4:
        wide = wide.float()
    mean = wide.mean()
    deviation = torch.linalg.vector_norm(wide - mean)
    return mean, deviation / max(wide.numel() - 1, 1) ** 0.5
