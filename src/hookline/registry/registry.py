# ruff: noqa
"""Moved to hookline.core.registry."""

from hookline.core.registry import HookRegistry as HookRegistry

__all__ = ["HookRegistry"]
