"""Moved to hookline.checkpoints.names."""

from hookline.checkpoints.names import NameTemplate as FileName

__all__ = ["FileName"]
