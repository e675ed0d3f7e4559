"""Moved to local_storage."""

from hookline.gradients.local_storage import group_by_kind
from hookline.gradients.local_storage import multiply_ as _multiply


def multiply_(tensors, factor):  # type: ignore[no-untyped-def]
    """Multiply all tensors in place."""
    _multiply(group_by_kind(tensors), factor)
