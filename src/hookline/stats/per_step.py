# mypy: implicit-reexport
"""Moved to hookline.stats.collector."""

from hookline.stats.collector import StepCollector as PerStep  # noqa: F401
from hookline.stats.collector import StepRows as StepRows
