# mypy: implicit-reexport
"""Moved to hookline.stats.rows."""

from hookline.stats.rows import norms as norms
