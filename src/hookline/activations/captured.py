"""Moved to `hookline.activations.capture_store`; what the direct call still needs is here until it is gone."""

from __future__ import annotations

import threading
from numbers import Integral
from typing import Any

from hookline import _checks
from hookline.activations.capture_store import CapturedState as CapturedState
from hookline.activations.capture_store import CaptureSource as Origin
from hookline.activations.capture_store import CaptureStore as CaptureStore

__all__ = ["CallNumbers", "CaptureStore", "CapturedState", "Origin", "Record", "check_limit", "this_thread"]

Record = tuple[Any, ...]
this_thread = threading.local()


def check_limit(option: str, given: Any, kind: type = Integral) -> None:
    """Check a limit that may be None."""
    check: Any = _checks.integer if kind is Integral else _checks.number
    _checks.optional(check, given, option, at_least=0)


class CallNumbers:
    """Numbers the calls of a module."""

    def __init__(self) -> None:
        self.given = self.torch_hook = 0

    @property
    def direct(self) -> int:
        """Return how many calls did not come through the torch hook."""
        return self.given - self.torch_hook

    def next(self) -> int:
        """Return the number of the next call."""
        self.torch_hook += 1
        self.given += 1
        return self.given
