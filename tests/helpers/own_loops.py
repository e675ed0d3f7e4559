"""Loops of a user's own for the tests of `attach`: a model, batches, and hooks that note what they are called with."""

import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hookline import ForwardHook, TrainingHook
from hookline.core.catalog import CATALOG
from hookline.hosts.attach import Attached

FEATURES, CLASSES = 8, 2


class Net(nn.Module):
    """A model with random numbers and running means, which show whether something was run once too often."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.norm(self.first(inputs)).relu())
        return self.last(hidden)  # type: ignore[no-any-return]


def make(optimizer: Any = torch.optim.AdamW, seed: int = 0, **options: Any) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    return model, optimizer(model.parameters(), **({"lr": 0.05} | options))


def batches(count: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 4, FEATURES, generator=generator)
    return [(each, (each.sum(-1) > 0).long()) for each in inputs]


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterable[Any], hl: Attached | None = None) -> None:
    """Train as people do; with `hl` the loss goes through it."""
    for batch in data:
        loss = loss_of(model, batch)
        if hl is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            hl.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """Check that weights and buffers are equal bit for bit."""
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert first.keys() == second.keys() and not different


def rows_of(hl: Attached) -> list[dict[str, Any]]:
    """Return the metrics of a run by step, as they are on disk."""
    assert hl.run.run_dir is not None
    return [json.loads(line) for line in (hl.run.run_dir / "metrics.jsonl").read_text().splitlines()]


def events_of(hl: Attached) -> list[dict[str, Any]]:
    assert hl.run.run_dir is not None
    return [json.loads(line) for line in (hl.run.run_dir / "events.jsonl").read_text().splitlines()]


class Events(TrainingHook):
    """Notes every lifecycle event with its step, as "step_end 3"."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def names(self) -> list[str]:
        return [event.partition(" ")[0] for event in self.seen]


def _noting(name: str) -> Any:
    def method(self: Events, step: int) -> None:
        self.seen.append(f"{name.removeprefix('on_')} {step}")

    return method


for _event in CATALOG.values():
    if _event.kind == "lifecycle" and _event.name != "on_gradient_clip":
        setattr(Events, _event.name, _noting(_event.name))


class Calls(ForwardHook):
    """Notes the step, the phase and the name of every module that is called."""

    modules = "*"

    def __init__(self) -> None:
        self.seen: list[tuple[int, str, str]] = []

    def on_forward(self, name: str, step: int, phase: str) -> None:
        self.seen.append((step, phase, name))
