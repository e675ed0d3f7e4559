# ruff: noqa
"""Moved to hookline.core.costs and hookline.core.dispatch."""

from hookline.core.costs import Cost as Cost
from hookline.core.dispatch import BoundHook as Bound
from hookline.core.dispatch import Dispatch as Fired
from hookline.core.dispatch import EventSlots as Fire
from hookline.core.dispatch import compile_event as compile_event
from hookline.core.dispatch import event_source as event_source
from hookline.core.dispatch import first_raised as first_raised
from hookline.core.dispatch import needed_arguments as wanted_attributes

__all__ = ["Bound", "Cost", "Fire", "Fired", "compile_event", "event_source", "first_raised", "wanted_attributes"]
