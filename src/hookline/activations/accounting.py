"""Moved to `fire_report`."""

from hookline.activations.fire_report import format_table as aligned

__all__ = ["aligned"]
