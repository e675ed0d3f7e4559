"""Moved to `hooked_modules`."""

from hookline.activations.hooked_modules import weak_selection as weakly

__all__ = ["weakly"]
