"""Moved to core/run_control.py."""

from hookline.core.run_control import RunControl as RunControl
