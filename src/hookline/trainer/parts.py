"""Moved to components.py."""

from hookline.trainer.components import Components as Parts

__all__ = ["Parts"]
