# mypy: implicit-reexport
"""Moved to hookline.stats.cache."""

from hookline.stats.cache import Snapshot as Known  # noqa: F401
from hookline.stats.cache import cache_norms as remember_norms  # noqa: F401
from hookline.stats.cache import cache_rows as remember  # noqa: F401
from hookline.stats.cache import cached_norms as recall_norms  # noqa: F401
from hookline.stats.cache import cached_rows as recall  # noqa: F401
from hookline.stats.cache import summarize_cached as summarize_once  # noqa: F401
