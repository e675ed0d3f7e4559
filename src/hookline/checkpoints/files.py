"""Moved to hookline.checkpoints.store."""

from hookline.checkpoints.store import list_checkpoints as list_checkpoints
from hookline.checkpoints.store import newest_good as newest_good
from hookline.checkpoints.store import read_checkpoint as read_checkpoint
from hookline.checkpoints.store import verify_checkpoint as verify_checkpoint
from hookline.checkpoints.store import write_checkpoint as write_checkpoint
