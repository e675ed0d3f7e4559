"""Moved to local_storage."""

from torch import Tensor

from hookline.gradients.local_storage import group_by_kind
from hookline.gradients.local_storage import multiply_ as _multiply


def multiply_(tensors: list[Tensor], factor: Tensor | float) -> None:
    """Multiply all tensors in place."""
    _multiply(group_by_kind(tensors), factor)
