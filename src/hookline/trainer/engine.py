"""Handle what differs between devices and precisions: placing batches, autocast, backward and loss scaling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hookline import _device
from hookline._tensors import map_tensors
from hookline.errors import TrainingError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Engine:
    """Run on one device in one process.

    Args:
        device: Where the model and the batches go.
        precision: 'fp32', 'bf16' or 'fp16'; the last one uses a GradScaler.
    """

    rank = 0
    world_size = 1

    def __init__(self, device: torch.device, precision: str = "fp32") -> None:
        self.device = device
        self.precision = precision
        self.scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None
        self._unscaled: list[torch.optim.Optimizer] = []  # in the current step
        # Loaders give CPU tensors: a run on the CPU has nothing to move, and does not look for it either.
        self.moves = device.type != "cpu"

    def prepare(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move the model to the device unless it is there."""
        tensors = (*model.parameters(), *model.buffers())
        return model if all(tensor.device == self.device for tensor in tensors) else model.to(self.device)

    def place(self, batch: Any) -> Any:
        """Move the tensors of a nested batch to the device; those that are there are not touched."""
        return map_tensors(lambda tensor: tensor.to(self.device, non_blocking=True), batch) if self.moves else batch

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which forward passes run."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[self.precision])

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass, scaled if the precision needs it."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Unscale the gradients before hooks read them, and return whether one of them overflowed.

        This waits for the device once, as the scaler would in its step.
        """
        self._unscaled = [one for one in optimizers if _has_gradients(one)] if self.scaler is not None else []
        if self.scaler is None or not self._unscaled:
            return False
        for optimizer in self._unscaled:
            self.scaler.unscale_(optimizer)
        states = self.scaler._per_optimizer_states
        return any(bool(found) for one in self._unscaled for found in states[id(one)]["found_inf_per_device"].values())

    def step(self, optimizer: torch.optim.Optimizer, step_function: Callable[..., Any] | None) -> bool:
        """Step an optimizer.

        Args:
            optimizer: The optimizer.
            step_function: The user's replacement for ``optimizer.step()``, if any.

        Returns:
            Whether the optimizer stepped; a GradScaler skips non-finite gradients.

        Raises:
            TrainingError: If there is both a step function and a GradScaler.
        """
        if self.scaler is None:
            optimizer.step() if step_function is None else step_function(optimizer)
            return True
        if step_function is not None:
            raise TrainingError("optimizer_step cannot be combined with precision='fp16': the GradScaler owns the step")
        if not _has_gradients(optimizer):  # the scaler would raise; there is nothing to scale
            optimizer.step()
            return True
        stepped: list[bool] = []
        handle = optimizer.register_step_post_hook(lambda *_: stepped.append(True))
        try:
            self.scaler.step(optimizer)
        finally:
            handle.remove()
        return bool(stepped)

    def end_step(self) -> None:
        """Update the scale, once per step that had gradients."""
        if self.scaler is not None and self._unscaled:
            self.scaler.update()


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(param.grad is not None for group in optimizer.param_groups for param in group["params"])


def find_device(device: Any) -> torch.device:
    """Return the device that a user named; None means the accelerator if there is one, else the CPU."""
    if device is None:
        return _device.default_device()
    try:
        return _device.with_index(torch.device(device))
    except (RuntimeError, TypeError) as error:
        raise TrainingError(f"{device!r} is not a device: {error}") from error
