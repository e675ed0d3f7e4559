# mypy: implicit-reexport
"""Moved to hookline.stats.distributed."""

from hookline.stats.distributed import LocalTensors as Pieces  # noqa: F401
