"""Save and load the state of a run: JSON and safetensors, written so that a crash at any moment loses nothing.

Knows nothing about trainers or hooks; imports `core` and the shared modules. `hooks`, `trainer` and the folders above
them may import it.
"""

from __future__ import annotations

from hookline.checkpoints.format import encode
from hookline.checkpoints.store import (
    list_checkpoints,
    newest_good,
    read_checkpoint,
    verify_checkpoint,
    write_checkpoint,
)

__all__ = ["encode", "list_checkpoints", "newest_good", "read_checkpoint", "verify_checkpoint", "write_checkpoint"]
