"""Train a model whose validation losses are written down beforehand."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hookline import GenericTrainer


class Scripted(torch.nn.Module):
    """A model with given validation losses; each step of SGD with a rate of 1 adds 1 to its weight."""

    def __init__(self, losses: Sequence[float]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.losses = list(losses)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if self.training:
            return batch.mean() - self.weight
        return torch.tensor(self.losses.pop(0))


def make_scripted(losses: Sequence[float], *hooks: Any, config: Any = None, **options: Any) -> GenericTrainer:
    """Make a trainer with these validation losses and these hooks, which keeps its record in memory."""
    model = Scripted(losses)
    options = {"record": False, "console": False, "sanity_batches": 0, **options}
    trainer = GenericTrainer(config, model, torch.optim.SGD(model.parameters(), lr=1.0), device="cpu", **options)
    for hook in hooks:
        trainer.add_hook(hook)
    return trainer


def train_scripted(losses: Sequence[float], config: Any, resume: Path | None = None, **options: Any) -> GenericTrainer:
    """Train two steps an epoch, with one validation at its end, for as many epochs as there are losses."""
    trainer = make_scripted(losses, config=config, **{"max_epochs": len(losses), **options})
    trainer.fit([torch.ones(2), torch.ones(2)], [torch.ones(1)], resume=resume)
    return trainer
