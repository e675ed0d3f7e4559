"""Moved to hookline.hooks.notify."""

from hookline.hooks.notify import NotifyHook as NotifyHook
