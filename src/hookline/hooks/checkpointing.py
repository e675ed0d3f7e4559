"""Moved to hookline.hooks.checkpoint."""

from hookline.hooks.checkpoint import CheckpointHook as CheckpointHook
from hookline.hooks.checkpoint import ModelCheckpoint as ModelCheckpoint
