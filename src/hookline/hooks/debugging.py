"""Moved to hookline.hooks.debug_training."""

from hookline.hooks.debug_training import DebugHook as DebugHook
