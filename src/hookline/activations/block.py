"""Moved to `hookline.activations.capture_session`."""

from hookline.activations.capture_session import forget_sessions as forget

__all__ = ["forget"]
