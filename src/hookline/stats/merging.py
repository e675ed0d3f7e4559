# mypy: implicit-reexport
"""Moved to hookline.stats.merge."""

from hookline.stats.merge import merge as merge
