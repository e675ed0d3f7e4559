# ruff: noqa
"""Moved to hookline.core.base."""

from hookline.core.base import StepContext as StepContext

__all__ = ["StepContext"]
