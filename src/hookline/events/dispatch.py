# ruff: noqa
"""Moved to hookline.core.costs and hookline.core.dispatch."""

from hookline.core.costs import Cost as Cost
from hookline.core.dispatch import BoundHook as Bound
from hookline.core.dispatch import Dispatch as Fired
from hookline.core.dispatch import EventSlots as Fire
from hookline.core.dispatch import first_raised as first_raised

__all__ = ["Bound", "Cost", "Fire", "Fired", "first_raised"]
