"""Save, restore and seed every random stream that training may draw from: torch's, Python's and NumPy's."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hookline import _device
from hookline.core.rng_guard import as_tuples


def rng_state() -> dict[str, Any]:
    """Return the states of torch (CPU and accelerators), Python, and NumPy if it is imported."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if (states := _device.rng_states()) is not None:
        state["cuda"] = states
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(as_tuples(state["python"]))
    if "cuda" in state:
        _device.set_rng_states(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))


def seed_everything(seed: int) -> None:
    """Seed torch (CPU and accelerators), Python, and NumPy if it is imported."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def seed_rank(seed: int | None, rank: int) -> None:
    """Seed the streams of a run that begins: rank 0 with the seed, other ranks with one that is derived from it.

    Ranks that train on different batches must not drop out the same units. Without a seed rank 0 is not seeded, and
    others are from what torch was seeded with, which is the same in every process unless it was set.
    """
    if rank == 0:
        if seed is not None:
            seed_everything(seed)
        return
    digest = hashlib.sha256(f"{torch.initial_seed() if seed is None else seed}/rank {rank}".encode()).digest()
    seed_everything(int.from_bytes(digest[:6], "little"))


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore all random streams after the block."""
    state = rng_state()
    try:
        yield
    finally:
        restore_rng(state)
