"""Moved to hookline.hooks.loss_spike."""

from hookline.hooks.loss_spike import LossSpike as LossSpike
