# mypy: implicit-reexport
"""Moved to hookline.stats.collector."""

from hookline.stats.collector import HostQueue as Flush  # noqa: F401
from hookline.stats.collector import HostRows as Arrival  # noqa: F401
