"""Moved to hookline.hooks.stall_watchdog."""

from hookline.hooks.stall_watchdog import StallWatchdog as StallWatchdog
