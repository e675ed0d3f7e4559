"""Moved to `hooked_modules`."""

from hookline.activations.hooked_modules import HookedModule as Site

__all__ = ["Site"]
