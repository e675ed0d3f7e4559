"""Running a batch again as training ran it: same weights, same random streams; afterwards nothing has happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hookline.trainer.forward import loss_and_metrics, make_step
from hookline.trainer.rng import restore_rng, rng_untouched
from hookline.trainer.validation import set_aside

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

Forward = Callable[[Any], torch.Tensor]


@contextmanager
def rerunning(trainer: Trainer, random_state: dict[str, Any]) -> Iterator[Forward]:
    """A function from a batch to its loss, with the graph, on the random streams of that moment.

    Modules stay in their modes and the model runs eagerly, so that hooks on any module are heard; those of the run are
    silent. Buffers that the forward pass moves (running means) are put back.
    """
    compute = make_step(unwrapped(trainer.model), trainer.step_fn, trainer.loss_fn)

    def forward(batch: Any) -> torch.Tensor:
        restore_rng(random_state)
        with torch.enable_grad(), trainer.engine.autocast():
            return loss_and_metrics(compute(trainer.engine.place(batch)))[0]

    with set_aside(trainer, "train"), rng_untouched(), trainer.hooks.silenced(), buffers_untouched(trainer.model):
        yield forward


@contextmanager
def buffers_untouched(model: torch.nn.Module) -> Iterator[None]:
    """Whatever the block does to the model's buffers is undone."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model itself: a wrapper would wait for other ranks, which do not run this batch again."""
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
