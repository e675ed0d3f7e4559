# ruff: noqa
"""Moved to hookline.core.handle."""

from hookline.core.handle import Handle as Handle

__all__ = ["Handle"]
