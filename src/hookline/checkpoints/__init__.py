"""Checkpoints: state as JSON and safetensors, written so that a crash at any moment loses nothing."""

from __future__ import annotations

from hookline.checkpoints.codec import decode, encode
from hookline.checkpoints.files import (
    list_checkpoints,
    newest_good,
    read_checkpoint,
    verify_checkpoint,
    write_checkpoint,
)

__all__ = [
    "decode",
    "encode",
    "list_checkpoints",
    "newest_good",
    "read_checkpoint",
    "verify_checkpoint",
    "write_checkpoint",
]
