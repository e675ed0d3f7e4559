# ruff: noqa
"""Moved to hookline.core.schedule."""

from hookline.core.schedule import Clock as Clock
from hookline.core.schedule import FAR as FAR
from hookline.core.schedule import Quantity as Quantity
from hookline.core.schedule import Reading as Reading
from hookline.core.schedule import Schedule as Schedule

__all__ = ["Clock", "FAR", "Quantity", "Reading", "Schedule"]
