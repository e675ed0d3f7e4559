"""Moved to `hookline._tensors`."""

from hookline._tensors import map_tensors as mapped

__all__ = ["mapped"]
