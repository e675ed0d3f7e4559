"""Moved to `hookline._tensors`."""

from hookline._tensors import iter_tensors as tensors_in

__all__ = ["tensors_in"]
