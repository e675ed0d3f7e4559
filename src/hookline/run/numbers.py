"""What counts as a number among metrics, and numbers without their graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def single_numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that are one number: hooks may pass each other anything, but a record holds numbers."""
    return {
        key: value
        for key, value in metrics.items()
        if isinstance(value, (int, float))
        or is_numpy_number(value)
        or (isinstance(value, torch.Tensor) and value.numel() == 1)
    }


def is_numpy_number(value: Any) -> bool:
    """Return whether a value is a real NumPy scalar or an array with one element; does not import NumPy."""
    return type(value).__module__ == "numpy" and getattr(value, "size", 0) == 1 and value.dtype.kind in "biuf"


def as_python_number(value: Any) -> Any:
    """Convert a NumPy number to Python's; return other values, tensors among them, as they are."""
    if not is_numpy_number(value):
        return value
    number = value.item()
    return number if isinstance(number, int) else float(number)  # the item of a longdouble is a longdouble


def detached_copy(value: Any) -> Any:
    """Return a number without its graph that nothing else can write to: Python's own, or a copy on the device."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.item() if value.is_cpu else value.detach().clone()
