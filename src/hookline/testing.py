"""Tools for tests of your own hooks: `assert_harmless` and a small trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hookline.build import SimpleTrainer
from hookline.trainer.trainer import Trainer
from hookline.verify import judge, observe_run


def small_trainer() -> Trainer:
    """Make a trainer for a model with dropout and batch norm, on eight batches; it writes nothing to disk."""
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
    """Fail unless training is bit for bit the same with a hook as without it; a hook that raises fails, too.

    Args:
        hook: The hook, as `Trainer.add_hook` takes it.
        make_trainer: Makes a new trainer that trains alike every time.
        steps: The number of optimizer steps to compare.

    Raises:
        AssertionError: If the hook changes training; the message says from which step on and through what.

    >>> assert_harmless(MyHook())
    """
    plain = observe_run(make_trainer(), None, steps)
    trainer = make_trainer()
    trainer.hooks.failures.debug = True  # an exception of the hook is one of the test
    name = str(trainer.add_hook(hook))
    verdict = judge(name, False, plain, observe_run(trainer, name, steps))
    if not verdict.harmless:
        raise AssertionError("; ".join([f"hook {name!r} {verdict}", *verdict.notes]))
