# ruff: noqa
"""Moved to hookline.core.sampling."""

from hookline.core.sampling import Sample as Sample

__all__ = ["Sample"]
