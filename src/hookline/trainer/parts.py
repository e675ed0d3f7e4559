"""The finished parts that a trainer is made of: `hookline.build` makes them, `Trainer` takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hookline.record.memory_record import MemoryRecord
from hookline.record.run_record import Record
from hookline.registry.registry import HookRegistry
from hookline.trainer.engines import Engine
from hookline.trainer.forward import StepFunction, count_tokens
from hookline.trainer.loaders import Loaders
from hookline.trainer.options import TrainerOptions


@dataclass
class Parts:
    """Everything is checked by then; what is None is left out or has a default in the loop."""

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
    config: Any = None  # what hooks see as trainer.config
    describe: Callable[[], Mapping[str, Any]] = dict  # the configuration, as the record writes it when a run begins
    make_record: Callable[[Mapping[str, Any], Path | None], Record] = lambda config, run_dir: MemoryRecord(config)
