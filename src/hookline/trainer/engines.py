"""Moved to engine.py."""

from hookline.trainer.engine import Engine as Engine
from hookline.trainer.engine import find_device as find_device
