"""Measure what hooks cost: time by hook and by argument, on the host and on the device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Cost:
    """Add up the time of one hook or one argument, on the host and on the device."""

    calls: int = 0
    ns: int = 0
    device_calls: int = 0  # Only some of the calls are timed on the device, too.
    device_ns: int = 0

    def add(self, ns: int) -> None:
        """Count one call."""
        self.calls += 1
        self.ns += ns

    def add_on_device(self, ns: int) -> None:
        """Count the device time of one of the calls."""
        self.device_calls += 1
        self.device_ns += ns

    @property
    def all_device_ns(self) -> float:
        """Estimate the device time of all calls from those that were timed."""
        return self.device_ns * self.calls / max(self.device_calls, 1)
