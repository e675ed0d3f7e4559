"""The components that a trainer is made of: `hookline.build` makes and checks them, `Trainer` takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hookline.core.registry import HookRegistry
from hookline.trainer.data.loaders import Loaders
from hookline.trainer.engine import Engine
from hookline.trainer.options import TrainerOptions
from hookline.trainer.step_fn import StepFunction, count_tokens


@dataclass
class Components:
    """Checked components; None means that a component is absent or has a default."""

    model: torch.nn.Module
    optimizers: list[torch.optim.Optimizer]
    hooks: HookRegistry
    engine: Engine
    options: TrainerOptions
    schedulers: list[Any] = field(default_factory=list)
    train_loaders: Loaders = None
    val_loaders: Loaders = None
    step_fn: StepFunction | None = None
    loss_fn: Callable[..., Any] | None = None
    optimizer_step: Callable[[torch.optim.Optimizer], Any] | None = None
    metrics: Mapping[str, Any] | None = None
    count_tokens: Callable[[Any], int] = count_tokens
    config: Any = None
    """What hooks see as `trainer.config`."""
    resolved: Mapping[str, Any] | None = None
    """The run's configuration for the record; without one the trainer describes its components."""
