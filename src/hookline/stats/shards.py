# mypy: implicit-reexport
"""Moved to hookline.stats.distributed."""

from hookline.stats.distributed import group_by_mesh as find_shards  # noqa: F401
