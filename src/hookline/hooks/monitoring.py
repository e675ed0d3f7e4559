"""Moved to hookline.hooks.activation_stats and hookline.hooks.json_log."""

from hookline.hooks.activation_stats import ActivationStats as ActivationStats
from hookline.hooks.json_log import JSONLogHook as JSONLogHook
