"""Make chains without a trainer: parameters with gradients, hooks by name, and a run control that records its calls."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hookline import HookRegistry
from hookline.gradients.chain import UpdateChain
from hookline.ranks import Ranks

Params = dict[str, torch.nn.Parameter]
SHAPES = {"matrix": (7, 3), "kernel": (4, 3, 2, 2), "vector": (5,), "scalar": (), "frozen": (2, 2)}


class NotingTrainer:
    """The part of a trainer that update hooks use."""

    def __init__(self) -> None:
        self.logged: dict[str, Any] = {}
        self.ranks = Ranks()
        self.skipped: list[str] = []

    def log(self, name: str, value: Any, step: int | None = None, reduce: str | None = "mean") -> None:
        self.logged[name] = value

    def skip_step(self, reason: str) -> None:
        self.skipped.append(reason)


class Rig:
    """Update hooks over parameters; `step` runs them as a trainer would."""

    def __init__(self, params: Mapping[str, torch.nn.Parameter], *entries: Any) -> None:
        self.params, self.trainer = params, NotingTrainer()
        self.registry = HookRegistry()
        self.chain = UpdateChain(self.registry, self.params, torch.nn.ParameterDict(params))
        self.steps = 0
        self.registry.load({"update": list(entries)})

    def step(self, grads: Mapping[str, Tensor] | None = None) -> dict[str, Tensor | None]:
        """Run the chain once, on new gradients if any are given; return copies of what it left."""
        for name, grad in (grads or {}).items():
            self.params[name].grad = grad.clone()
        self.steps += 1
        args = SimpleNamespace(step=self.steps, epoch=0, model=None, trainer=self.trainer)
        args.set_clipped_norm = lambda norm, is_global: setattr(self, "clipped", (norm, is_global))
        if fired := self.registry.slots.on_update:
            fired(args)
        return {name: None if p.grad is None else p.grad.clone() for name, p in self.params.items()}


def make_params(dtype: torch.dtype = torch.float32, seed: int = 0) -> Params:
    """Make weights and gradients of several shapes from a seed; 'frozen' has no gradient."""
    stream = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=stream).to(dtype) for name, shape in SHAPES.items()}
    params = {name: torch.nn.Parameter(weight) for name, weight in weights.items()}
    for name, param in params.items():
        if name != "frozen":
            param.grad = (torch.randn(param.shape, generator=stream) * 5).to(dtype)
    return params


@pytest.fixture
def params() -> Callable[..., Params]:
    """Return the function that makes parameters with gradients."""
    return make_params


@pytest.fixture
def rig() -> type[Rig]:
    """Return the class that makes a chain of hooks over parameters."""
    return Rig


@pytest.fixture
def apply() -> Callable[..., dict[str, Tensor | None]]:
    """Return a function that applies one hook to the gradients of `make_params`; `seed` and `dtype` choose those."""

    def run(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **given: Any) -> dict[str, Tensor | None]:
        return Rig(make_params(dtype, seed), {"name": name, **given}).step()

    return run
