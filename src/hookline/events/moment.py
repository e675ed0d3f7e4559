# ruff: noqa
"""Moved to hookline.core.failures."""

from hookline.core.failures import argument_if_any as known
from hookline.core.failures import step_of as known_step

__all__ = ["known", "known_step"]
