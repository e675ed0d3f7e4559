"""Training's random streams can be kept, put back and left untouched, all of them together."""

import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from hookline.trainer.rng import preserve_rng, restore_rng, rng_state, seed_everything


def draw() -> list[float]:
    """One number from each stream; the normals leave a spare one behind in Python and NumPy."""
    return [torch.rand(1).item(), torch.randn(1).item(), random.random(), random.gauss(0, 1), float(np.random.randn())]


def test_the_same_seed_draws_the_same() -> None:
    """torch, Python and NumPy are all seeded; a seed above 32 bits is fine."""
    seed_everything(2**40 + 3)
    first = draw()
    seed_everything(2**40 + 3)
    assert draw() == first
    seed_everything(4)
    assert draw() != first


def test_a_state_brings_back_every_stream() -> None:
    """What is drawn after restoring is what was drawn after saving, spare normals included."""
    draw()
    state = rng_state()
    first = draw()
    draw()
    restore_rng(state)
    assert draw() == first


def test_a_state_survives_json() -> None:
    """Lists in the places of tuples, as a checkpoint brings them, are fine."""
    state = rng_state()
    first = draw()
    state["python"] = json.loads(json.dumps(state["python"]))
    state["numpy"] = list(state["numpy"])
    restore_rng(state)
    assert draw() == first


@pytest.mark.parametrize("fails", [False, True])
def test_streams_are_preserved(fails: bool) -> None:
    """Whatever is drawn or raised inside the block, the streams continue as if nothing had happened."""
    state = rng_state()
    expected = draw()
    restore_rng(state)
    error: Any = None
    try:
        with preserve_rng():
            draw()
            seed_everything(1)
            if fails:
                raise ValueError
    except ValueError as raised:
        error = raised
    assert (error is not None) == fails
    assert draw() == expected
