"""The model, the batches and the optimizer that every contender trains.

So small that a step is nearly all overhead: what a trainer adds is then a large part of what is measured.
"""

from collections.abc import Iterator
from itertools import cycle

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]

FEATURES, HIDDEN, CLASSES, BATCH_SIZE = 32, 64, 10, 16

loss_fn = nn.CrossEntropyLoss()


def layers() -> list[nn.Module]:
    """Make the layers of the model, with the same weights at every call."""
    torch.manual_seed(0)
    return [nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)]


def make_model() -> nn.Module:
    """Make the model of most contenders: inputs in, logits out."""
    return nn.Sequential(*layers())


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Make plain SGD: the cheapest optimizer, whose variance hides the least."""
    return torch.optim.SGD(model.parameters(), lr=0.01)


def make_batches(count: int = 64) -> list[Batch]:
    """Make the same batches for every contender, beforehand."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(BATCH_SIZE, FEATURES, generator=generator),
            torch.randint(CLASSES, (BATCH_SIZE,), generator=generator),
        )
        for _ in range(count)
    ]


class Endless:
    """Repeats the batches: a loader for contenders that are stepped from outside."""

    def __init__(self) -> None:
        """Make the batches once."""
        self._batches = make_batches()

    def __iter__(self) -> Iterator[Batch]:
        """Start at the first batch and never end."""
        return cycle(self._batches)
