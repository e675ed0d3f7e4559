"""Build what most tests train: a small model, random batches, and a trainer that runs them on the CPU."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from hookline import SimpleTrainer, get_trainer

Batch = tuple[torch.Tensor, torch.Tensor]


def make_model(*sizes: int, between: type[nn.Module] | None = nn.ReLU, seed: int | None = 0) -> nn.Sequential:
    """Make linear layers of the given sizes, 3 to 4 to 1 without any, with a module between each two of them.

    Args:
        sizes: The features of the input, of each hidden layer and of the output.
        between: The class of the modules between the layers; None for none.
        seed: Seeds torch before the weights are drawn; None leaves its random state alone.
    """
    sizes = sizes or (3, 4, 1)
    if seed is not None:
        torch.manual_seed(seed)
    modules: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        if modules and between is not None:
            modules.append(between())
        modules.append(nn.Linear(inputs, outputs))
    return nn.Sequential(*modules)


def batches_of(*sizes: int, features: int = 3, targets: int = 1, seed: int = 0) -> list[Batch]:
    """Make a batch of each size, of random inputs and targets; a seed gives the same ones whatever else is drawn."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, features, generator=generator), torch.randn(size, targets, generator=generator))
        for size in sizes
    ]


def make_batches(count: int = 4, size: int = 4, features: int = 3, targets: int = 1, seed: int = 0) -> list[Batch]:
    """Make batches of one size, as `batches_of` does."""
    return batches_of(*[size] * count, features=features, targets=targets, seed=seed)


def make_trainer(
    *hooks: Any, model: nn.Module | Callable[[], nn.Module] | None = None, data: Any = None, optimizer: Any = None,
    lr: float = 0.1, device: str = "cpu", **options: Any,
) -> SimpleTrainer:  # fmt: skip
    """Make a trainer for one epoch of four batches, which prints nothing and keeps its record in memory.

    Args:
        hooks: Added to the trainer, in this order.
        model: The model, or a function that makes one; a `make_model()` without it.
        data: The loader or loaders; `make_batches()` without it.
        optimizer: The optimizer, or a function that makes one of the parameters; SGD of `lr` without it.
        lr: The learning rate of the default optimizer.
        device: Where to train.
        options: Options of the trainer; `record=True` writes a run below the test's own directory, and `scheduler` may
            be a function that makes one of the optimizer.
    """
    model = model if isinstance(model, nn.Module) else (model or make_model)()
    optimizer = partial(torch.optim.SGD, lr=lr) if optimizer is None else optimizer
    optimizer = optimizer(model.parameters()) if callable(optimizer) else optimizer
    options = {"loss_fn": nn.functional.mse_loss, "record": False, "console": False, **options}
    if callable(make_scheduler := options.get("scheduler")):
        options["scheduler"] = make_scheduler(optimizer)
    trainer = get_trainer("simple", model, make_batches() if data is None else data, optimizer, device, **options)
    assert isinstance(trainer, SimpleTrainer)
    for hook in hooks:
        trainer.add_hook(hook)
    return trainer


def train(*hooks: Any, **options: Any) -> SimpleTrainer:
    """Make a trainer as `make_trainer` does, train it, and return it."""
    trainer = make_trainer(*hooks, **options)
    trainer.train()
    return trainer


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copy the parameters, by name."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}
