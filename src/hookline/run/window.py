"""`Window`: the micro-batches of one optimizer step; here one micro-batch is a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hookline._tensors import count_samples
from hookline.run.engine import Engine

if TYPE_CHECKING:
    from hookline.run.epoch_stats import EpochStats


class MicroBatch(NamedTuple):
    """One micro-batch of the current accumulation window."""

    loss: Tensor
    weight: float
    batch_idx: int
    loader: str
    metrics: dict[str, Any]
    """Numbers that `step_fn` returned besides the loss."""
    share: float = 1.0
    """Its weight in means over an epoch; on several ranks, its share of the global micro-batch."""


class Window:
    """A window of one micro-batch. `AccumulationWindow` (trainer/window.py) has several, with weights.

    `begin` prepares a micro-batch, `backward` gives its loss its share of the step, and one of them counts it.
    `Steps.window_is_complete` ends the window after its last one, at the latest with the last batch of the epoch.
    `Steps.end_batch` empties it.
    """

    size = 1
    """Micro-batches of a full window."""
    weight = 1.0
    """The weight of the current micro-batch in the step's mean; zero leaves it out."""
    has_weight = True
    """Whether anything in the window has a weight, on any rank."""
    is_weighted = False
    """Whether losses are multiplied by their weights before the backward pass."""
    rank_weight = 1.0
    """Weight of this rank's means in the mean over all ranks; 1.0 if all ranks count equally."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.count = 0  # micro-batches of the window so far
        self.is_complete = False  # whether the last of them was the window's last

    def begin(self, batch: Any) -> bool:
        """Prepare for a micro-batch, whose tensors are where the loader put them; return whether it begins a window."""
        self.count = 1
        return True

    def weigh_batch(self, batch: Any) -> float:
        """Return the weight of a batch in a validation's means; its tensors are where the loader put them."""
        return count_samples(batch)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a micro-batch with its share of the window."""
        self._engine.backward(loss)

    def add_to_means(self, stats: EpochStats, name: str, value: Tensor | float) -> None:
        """Add a number of the current micro-batch to a mean of the epoch; its weight may be zero."""
        if self.weight:
            stats.add(name, value)

    def add_loss_of(self, part: MicroBatch, stats: EpochStats, name: str) -> None:
        """Add the loss of a micro-batch of the window, which is complete, to a mean of the epoch."""
        stats.add(name, part.loss)

    def finish_gradients(self) -> None:
        """Turn the accumulated gradients into those of the step: unscaled, and the mean over the window."""

    def combine(self, parts: Sequence[MicroBatch]) -> Tensor:
        """Return the loss of a step, given its micro-batches; it stays on its device."""
        return weighted_mean(parts)

    def weigh(self, value: Any) -> Any:
        """Return what this rank adds to a mean over the ranks that weights each by what was in its window."""
        if self.rank_weight == 1.0:
            return value
        return value * self.rank_weight if self.rank_weight else 0.0  # the mean of nothing may be NaN

    def leave(self) -> None:
        """Leave the model as it was, even if the run fails inside a window."""

    def check_trained(self) -> None:
        """Raise TrainingError if no step of the run had anything to train on."""


def weighted_mean(parts: Sequence[MicroBatch]) -> Tensor:
    """Return the mean loss of micro-batches by their weights, on its device."""
    counted = [part for part in parts if part.weight]  # the loss of a micro-batch with weight zero may be NaN
    total = sum(part.weight for part in counted)
    return torch.stack([part.loss * (part.weight / total) for part in counted]).sum()


def without_nan(value: Any, weight: float) -> tuple[Any, Any]:
    """Return a number and its weight, or zeros if it is NaN. A tensor stays on its device, and so does its weight."""
    if isinstance(value, Tensor):
        return value.nan_to_num(0.0), ~value.isnan() * weight
    return (0.0, 0.0) if math.isnan(value) else (value, weight)
