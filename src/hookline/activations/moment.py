"""Moved to `forward_hooks` and `hookline._tensors`."""

from typing import Any

import torch

from hookline._tensors import iter_tensors
from hookline.activations.forward_hooks import first_floating as first_floating


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return every tensor of a nested value, in order."""
    return list(iter_tensors(value))
