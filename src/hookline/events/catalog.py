# ruff: noqa
"""Moved to hookline.core.catalog."""

from hookline.core.catalog import ARGUMENTS as ARGUMENTS
from hookline.core.catalog import ARGUMENT_ALIASES as ARGUMENT_ALIASES
from hookline.core.catalog import CATALOG as CATALOG
from hookline.core.catalog import Event as Event
from hookline.core.catalog import SPELLINGS as SPELLINGS
from hookline.core.catalog import find_event as find_event

__all__ = ["ARGUMENTS", "ARGUMENT_ALIASES", "CATALOG", "Event", "SPELLINGS", "find_event"]
