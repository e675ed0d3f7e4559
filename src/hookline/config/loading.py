"""Moved to hookline.config.load."""

from hookline.config.load import load_config as load_config
