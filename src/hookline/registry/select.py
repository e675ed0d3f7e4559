# ruff: noqa
"""Moved to hookline.core.patterns."""

from hookline.core.patterns import select as select

__all__ = ["select"]
