"""Save, restore and seed every random stream that training may draw from: torch's, Python's and NumPy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hookline import _device
from hookline.core.rng_guard import hashed_seed, host_streams


def rng_state() -> dict[str, Any]:
    """Return the states of torch (CPU and accelerators), Python, and NumPy if it is imported."""
    state = {stream.name: stream.get() for stream in host_streams()}
    if (states := _device.rng_states()) is not None:
        state["cuda"] = states
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned."""
    for stream in host_streams():
        if stream.name in state:
            stream.put(state[stream.name])
    if "cuda" in state:
        _device.set_rng_states(state["cuda"])


def seed_everything(seed: int) -> None:
    """Seed torch (CPU and accelerators), Python, and NumPy if it is imported."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def seed_rank(seed: int | None, rank: int) -> None:
    """Seed the streams of a run that begins: rank 0 with the seed, other ranks with one that is derived from it.

    Ranks that train on different batches must not drop out the same units. Without a seed, rank 0 is not seeded; the
    others are seeded from torch's initial seed, which is the same in every process unless it was set.
    """
    if rank == 0:
        if seed is not None:
            seed_everything(seed)
        return
    seed_everything(hashed_seed(f"{torch.initial_seed() if seed is None else seed}/rank {rank}"))


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore all random streams after the block."""
    state = rng_state()
    try:
        yield
    finally:
        restore_rng(state)
