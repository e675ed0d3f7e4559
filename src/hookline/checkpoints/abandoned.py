"""Moved to hookline.checkpoints.store."""

from hookline.checkpoints.store import set_aside_later as set_aside_later
