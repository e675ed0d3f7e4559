"""`StepContext`: what `on_step_end` gets as `ctx`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass
class StepContext:
    """One finished optimizer step. Model and optimizer are the live objects; the gradients are already gone.

    When the training loop makes it, `loss` and `grad_norm` are computed on first access, so a heartbeat that only
    reads `ctx.step` costs nothing.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_seen: int
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
