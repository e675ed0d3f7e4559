"""Moved to `cow_views`."""

from hookline._tensors import map_tensors as mapped
from hookline.activations.cow_views import copy_on_write, shares_memory
from hookline.activations.cow_views import unwrap as unwrapped

__all__ = ["copy_on_write", "mapped", "shares_memory", "unwrapped"]
