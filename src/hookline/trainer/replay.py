"""Run a batch again as training ran it, with the same weights and random streams, and leave no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hookline.trainer.rng import preserve_rng, restore_rng
from hookline.trainer.step_fn import loss_and_metrics, make_step

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

Forward = Callable[[Any], torch.Tensor]


@contextmanager
def replaying(trainer: Trainer, random_state: dict[str, Any]) -> Iterator[Forward]:
    """Yield a function from a batch to its loss, with its graph.

    Modules stay in their modes and the model runs eagerly, so that foreign hooks on any module fire; the run's own
    hooks do not. Buffers that the forward pass updates (running means) are restored afterwards.

    Args:
        trainer: The trainer.
        random_state: The random streams that every call starts from, as `rng_state` returned them.
    """
    compute = make_step(unwrap_ddp(trainer.model), trainer.step_fn, trainer.loss_fn)

    def forward(batch: Any) -> torch.Tensor:
        restore_rng(random_state)
        with torch.enable_grad(), trainer.engine.autocast():
            return loss_and_metrics(compute(trainer.engine.place(batch)))[0]

    preserved = trainer.event_args.preserve_train_batch("train")
    with preserved, preserve_rng(), trainer.hooks.silenced(), _preserve_buffers(trainer.model):
        yield forward


@contextmanager
def _preserve_buffers(model: torch.nn.Module) -> Iterator[None]:
    copies = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, copy in copies:
                buffer.copy_(copy)


def unwrap_ddp(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside DistributedDataParallel, which would wait for ranks that do not replay this batch."""
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
