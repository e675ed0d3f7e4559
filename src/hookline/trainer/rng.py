"""The state of every random stream that training may draw from."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def rng_state() -> dict[str, Any]:
    """torch (CPU and CUDA), Python, and NumPy if it is loaded."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Put every stream back to where it was."""
    torch.set_rng_state(state["torch"])
    random.setstate(as_tuples(state["python"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))


def seed_everything(seed: int) -> None:
    """Seed torch (CPU and CUDA), Python, and NumPy if it is loaded."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


@contextmanager
def rng_untouched() -> Iterator[None]:
    """Whatever is drawn inside the block, training's streams go on as if nothing had been."""
    state = rng_state()
    try:
        yield
    finally:
        restore_rng(state)


def as_tuples(value: Any) -> Any:
    """A state of Python's generator that has been through JSON, where tuples become lists."""
    return tuple(as_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value
