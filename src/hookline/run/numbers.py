"""Numbers of steps and batches: what counts as one, and their means by weight."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hookline.run.control import MicroBatch


def weighted_mean(parts: Sequence[MicroBatch]) -> torch.Tensor:
    """Return the mean loss of micro-batches by their weights, on its device."""
    counted = [part for part in parts if part.weight]  # the loss of a micro-batch without weight may be NaN
    total = sum(part.weight for part in counted)
    return torch.stack([part.loss * (part.weight / total) for part in counted]).sum()


def without_nan(value: Any, weight: float) -> tuple[Any, Any]:
    """Return a number and its weight; if it is NaN, zeros. A tensor stays on its device, and so does its weight."""
    if isinstance(value, torch.Tensor):
        return value.nan_to_num(0.0), ~value.isnan() * weight
    return (0.0, 0.0) if math.isnan(value) else (value, weight)


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
