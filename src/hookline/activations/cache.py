"""Moved to `hookline.activations.capture_session`."""

from hookline.activations.capture_session import Cache as Cache
from hookline.activations.capture_session import EarlyStopCapture as StoppingCapture

__all__ = ["Cache", "StoppingCapture"]
