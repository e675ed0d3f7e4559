"""Moved to `torch_compile`."""

from hookline.activations.torch_compile import is_imported as is_loaded
from hookline.activations.torch_compile import run_uncompiled as as_plain_python

__all__ = ["as_plain_python", "is_loaded"]
