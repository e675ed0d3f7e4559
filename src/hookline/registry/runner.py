# ruff: noqa
"""Moved to hookline.core.runner."""

from hookline.core.runner import HookRunner as HookRunner

__all__ = ["HookRunner"]
