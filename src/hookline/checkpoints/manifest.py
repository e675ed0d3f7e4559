"""Moved to hookline.checkpoints.store."""

from hookline.checkpoints.store import MANIFEST as MANIFEST
from hookline.checkpoints.store import read_manifest as read_manifest
