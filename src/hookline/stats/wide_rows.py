# mypy: implicit-reexport
"""Moved to hookline.stats.histograms."""

from hookline.stats.histograms import histograms_in as histograms_of  # noqa: F401
from hookline.stats.histograms import summarize_with_histograms as measure_with_histograms  # noqa: F401
