"""Training's random streams are seeded, saved, restored and left untouched, all of them together."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from read_batches import make_reader

from hookline import SimpleTrainer


def draw() -> list[float]:
    """One number from each stream; the normals leave a spare one behind in Python and NumPy."""
    return [torch.rand(1).item(), torch.randn(1).item(), random.random(), random.gauss(0, 1), float(np.random.randn())]


def make_trainer(drawn: list[list[float]], **options: Any) -> SimpleTrainer:
    """Make a trainer whose steps draw from every stream."""

    def step(model: Any, batch: Any) -> torch.Tensor:
        drawn.append(draw())
        return model.weight.sum()

    return make_reader({"a": [0] * 4}, step_fn=step, **options)


def test_the_same_seed_draws_the_same() -> None:
    """torch, Python and NumPy are all seeded; a seed above 32 bits is fine."""
    drawn: list[list[float]] = []
    for seed in (2**40 + 3, 2**40 + 3, 4):
        make_trainer(drawn, seed=seed, max_steps=1).train()
    first, again, other = drawn
    assert first == again and not set(first) & set(other)


@pytest.mark.parametrize("stop_at", [1, 2])
def test_a_checkpoint_brings_back_every_stream(stop_at: int, tmp_path: Path) -> None:
    """What is drawn after resuming is what an uninterrupted run draws, spare normals included."""
    whole, parts = list[list[float]](), list[list[float]]()
    make_trainer(whole, seed=1).train()
    trainer = make_trainer(parts, seed=1, record=True, output_dir=str(tmp_path), max_steps=stop_at)
    trainer.on("step_end", at=stop_at)(lambda trainer: trainer.save())
    trainer.train()
    draw()
    make_trainer(parts, seed=1).fit(resume=trainer.run_dir)
    assert parts == whole and len(whole) == 4


@pytest.mark.parametrize("fails", [False, True])
def test_streams_are_preserved(fails: bool) -> None:
    """Whatever is drawn or raised inside the block, the streams continue as if nothing had happened."""
    trainer = make_trainer([])
    expected = []
    for inside in (False, True):
        torch.manual_seed(3), random.seed(3), np.random.seed(3)
        try:
            with trainer.inference():
                if inside:
                    draw()
                    torch.manual_seed(1)
                    if fails:
                        raise ValueError
        except ValueError:
            assert fails
        expected.append(draw())
    assert expected[0] == expected[1]


def test_a_hook_that_has_just_drawn_continues_with_its_own_numbers(tmp_path: Path) -> None:
    """Its streams are saved with the step of its first draw, also for a run that is resumed with another seed."""
    drawn: list[float] = []

    def train(seed: int, resume: Path | None = None) -> SimpleTrainer:
        trainer = make_trainer([], seed=seed, record=True, output_dir=str(tmp_path))
        trainer.on("step_end", name="draws")(lambda: drawn.append(torch.rand(1).item()))
        # With two hooks at the event, the one that draws is known at the second step, after which the run is saved.
        trainer.on("step_end", name="saves")(lambda trainer, step: trainer.save("two") if step == 2 else None)
        trainer.fit(resume=resume, fork=resume is not None)
        return trainer

    whole = train(1)
    assert whole.checkpoint_dir is not None
    expected, drawn = drawn[2:], []
    train(2, whole.checkpoint_dir / "two")
    assert drawn == expected and len(drawn) == 2
