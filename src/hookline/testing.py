"""For tests of one's own hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hookline.build import SimpleTrainer
from hookline.trainer.trainer import Trainer
from hookline.verification import judge, watch


def small_trainer() -> Trainer:
    """A model with dropout and batch norm that draws at every step, and eight batches; nothing is written to disk."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Dropout(), torch.nn.Linear(8, 1)
        )
        batches = [(torch.randn(4, 6), torch.randn(4, 1)) for _ in range(8)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return SimpleTrainer(
        model, batches, optimizer, "cpu",
        loss_fn=torch.nn.MSELoss(), max_epochs=1000, record=False, console=False, seed=0,
    )  # fmt: skip


def assert_harmless(hook: Any, make_trainer: Callable[[], Trainer] = small_trainer, steps: int = 16) -> None:
    """Fail unless training is bit for bit the same with the hook as without it; a hook that raises fails, too.

    >>> assert_harmless(MyHook())
    """
    plain = watch(make_trainer(), (), steps)
    trainer = make_trainer()
    trainer.hooks.desk.debug = True  # its errors are the test's
    name = str(trainer.add_hook(hook))
    verdict = judge(name, False, plain, watch(trainer, (name,), steps))
    if not verdict.harmless:
        raise AssertionError(f"hook {name!r} {verdict}")
