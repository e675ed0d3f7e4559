# mypy: implicit-reexport
"""Moved to hookline.stats.layout."""

from hookline.stats.layout import Launch as Launch
