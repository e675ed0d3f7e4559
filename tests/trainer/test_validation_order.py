"""A validation does not change the order in which training reads, whatever the two have in common."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import make_model, make_trainer
from torch.utils.data import DataLoader, TensorDataset

from hookline import ResumableSampler

DATA = TensorDataset(torch.arange(48.0).view(24, 2), torch.zeros(24, 1))


def own_generator() -> DataLoader[Any]:
    return DataLoader(DATA, 4, shuffle=True, generator=torch.Generator().manual_seed(0))


def resumable() -> DataLoader[Any]:
    return DataLoader(DATA, 4, sampler=ResumableSampler(DATA, seed=1))


def global_stream() -> DataLoader[Any]:
    return DataLoader(DATA, 4, shuffle=True)


def sister(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Another loader with the same generator."""
    return DataLoader(DATA, 6, shuffle=True, generator=loader.generator)


def order(loader: DataLoader[Any], validated: Any) -> list[float]:
    """The first number of every training batch of three epochs, with a validation every two steps."""
    options = {"val_loaders": validated, "max_epochs": 3, "validate_every": 2, "seed": 1}
    trainer, seen = make_trainer(model=make_model(2, 1), data=loader, lr=0.0, **options), []
    trainer.on("train_batch_start")(lambda batch: seen.append(batch[0][0, 0].item()))
    trainer.train()
    return seen


@pytest.mark.parametrize("make", [own_generator, resumable, global_stream])
@pytest.mark.parametrize("other", [lambda loader: loader, sister], ids=["itself", "sister"])
def test_training_reads_as_it_would_without(
    make: Callable[[], DataLoader[Any]], other: Callable[[DataLoader[Any]], DataLoader[Any]]
) -> None:
    """Also the tried validation before the first step counts for nothing."""
    plain, shared = make(), make()
    assert order(plain, None) == order(shared, {"train": other(shared), "more": [DATA[:4]]})


@pytest.mark.parametrize("event", ["validation_start", "validation_end"])
def test_what_hooks_read_around_a_validation_changes_no_order(event: str) -> None:
    """They are a part of it."""
    orders = []
    for reads in (False, True):
        loader = own_generator()
        validated = sister(loader)
        options = {"val_loaders": validated, "max_epochs": 3, "seed": 1}
        trainer, seen = make_trainer(model=make_model(2, 1), data=loader, lr=0.0, **options), list[float]()
        trainer.on("train_batch_start")(lambda batch, seen=seen: seen.append(batch[0][0, 0].item()))
        trainer.on(event)(lambda reads=reads, validated=validated: reads and next(iter(validated)) and None)
        trainer.train()
        orders.append(seen)
    assert orders[0] == orders[1]
