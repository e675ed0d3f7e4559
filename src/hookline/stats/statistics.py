# mypy: implicit-reexport
"""Moved to hookline.stats.rows."""

from hookline.stats.rows import STATISTICS as STATISTICS
from hookline.stats.rows import has_kernels as has_kernels
from hookline.stats.rows import summarize as summarize
