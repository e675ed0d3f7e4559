"""Hooks about the optimization itself, under one name; each lies in a file of its own."""

from __future__ import annotations

from hookline.hooks.early_stopping import EarlyStopping
from hookline.hooks.ema import EMAHook
from hookline.hooks.learning_rate import LearningRateMonitor

__all__ = ["EMAHook", "EarlyStopping", "LearningRateMonitor"]
