# ruff: noqa
"""Moved to hookline.core.entry."""

from hookline.core.entry import Entry as Entry

__all__ = ["Entry"]
