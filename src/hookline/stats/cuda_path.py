# mypy: implicit-reexport
"""Moved to hookline.stats.cuda."""

from hookline.stats.cuda import ELEMENTS as ELEMENTS
