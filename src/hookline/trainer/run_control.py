"""What hooks get as `trainer`: small enough that any loop can offer it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from hookline.registry.registry import HookRegistry


class RunControl(Protocol):
    """A run, as hooks may see and steer it. Our trainer is one; so is any other loop that Hookline is attached to."""

    model: torch.nn.Module
    device: torch.device
    config: Any
    hook_data: dict[str, Any]
    loss_fn: Any

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The live optimizers; writing a group's lr takes effect."""

    @property
    def hooks(self) -> HookRegistry:
        """The registry the run fires its events through."""

    @property
    def run_dir(self) -> Path | None:
        """The run's directory; None when nothing is written."""

    @property
    def total_steps(self) -> int | None:
        """How many optimizer steps the run will make, if that can be known."""

    @property
    def run_id(self) -> str | None:
        """The run's id, once it has begun."""

    @property
    def step(self) -> int:
        """The optimizer step that is under way, or was last."""

    @property
    def epoch(self) -> int:
        """The epoch that is under way, from 0."""

    @property
    def lr(self) -> float:
        """Learning rate of the first group of the first optimizer; assigning scales every group alike."""

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Record a number or a device tensor, at this step unless told another, without waiting for the device."""

    def log_layers(
        self, series: str, names: Sequence[str], columns: Sequence[str], values: torch.Tensor, step: int | None = None
    ) -> None:
        """Record numbers per layer, one row a name and one column a statistic, without waiting for the device."""

    def skip_step(self, reason: str) -> None:
        """Leave this window's optimizer step out (for guards in the update chain)."""

    def request_stop(self, reason: str, by: str | None = None) -> None:
        """End the run in order, once this step is complete."""

    def save(self, name: str | Callable[[], str] | None = None) -> None:
        """Write a checkpoint at the next step boundary, by its step's name unless it gets one of its own."""

    def inference(self) -> AbstractContextManager[torch.nn.Module]:
        """Run the model in eval mode, without grad, with random streams and forward hooks set aside."""
