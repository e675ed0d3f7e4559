"""Moved to hookline.hooks.lr_monitor."""

from hookline.hooks.lr_monitor import LearningRateMonitor as LearningRateMonitor
