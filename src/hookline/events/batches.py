# ruff: noqa
"""Moved to hookline._tensors."""

from hookline._tensors import count_samples as count_samples
from hookline._tensors import iter_tensors as tensors_of

__all__ = ["count_samples", "tensors_of"]
