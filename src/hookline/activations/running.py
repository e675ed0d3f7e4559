"""Moved to `hooked_modules`."""

from hookline.activations.hooked_modules import RunningModules as Running

__all__ = ["Running"]
