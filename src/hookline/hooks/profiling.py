"""Moved to hookline.hooks.profiler."""

from hookline.hooks.profiler import Profiler as Profiler
