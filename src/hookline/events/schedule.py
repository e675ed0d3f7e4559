# ruff: noqa
"""Moved to hookline.core.schedule."""

from hookline.core.schedule import Quantity as Quantity
from hookline.core.schedule import Reading as Reading
from hookline.core.schedule import Schedule as Schedule

__all__ = ["Quantity", "Reading", "Schedule"]
