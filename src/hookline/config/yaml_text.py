"""Moved to hookline.config.values."""

from hookline.config.values import read_yaml as read_yaml
