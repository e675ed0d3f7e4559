# ruff: noqa
"""Moved to hookline.core.signature."""

from hookline.core.signature import Listener as Listener
from hookline.core.signature import by_hand as by_hand
from hookline.core.signature import read_signature as read_signature

__all__ = ["Listener", "by_hand", "read_signature"]
