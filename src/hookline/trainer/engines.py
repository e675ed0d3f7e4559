"""What differs between one process, Accelerate and torchrun: placing, backward, scaling, and who has a say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hookline.errors import TrainingError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Engine:
    """One process, one device."""

    rank = 0
    world_size = 1

    def __init__(self, device: torch.device, precision: str = "fp32") -> None:
        self.device = device
        self.precision = precision
        self.scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None
        self._unscaled: list[torch.optim.Optimizer] = []  # in this step
        # Loaders give CPU tensors: a CPU run has nothing to move, and should not pay for finding that out.
        self.moves = device.type != "cpu"

    def prepare(self, model: torch.nn.Module) -> torch.nn.Module:
        """Put the model where it trains."""
        return model if _all_on(model, self.device) else model.to(self.device)

    def place(self, batch: Any) -> Any:
        """The batch on the device, its structure kept; tensors that are there already are not touched."""
        if not self.moves:
            return batch
        if isinstance(batch, torch.Tensor):
            return batch if batch.device == self.device else batch.to(self.device, non_blocking=True)
        if isinstance(batch, Mapping):
            return {key: self.place(value) for key, value in batch.items()}
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):
            return type(batch)(*(self.place(item) for item in batch))
        if isinstance(batch, (tuple, list)):
            return type(batch)(self.place(item) for item in batch)
        return batch

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision that forward passes run in."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[self.precision])

    def backward(self, loss: torch.Tensor) -> None:
        """Backward, scaled when the precision needs it."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Give the gradients their true values, before anybody looks at them; whether one overflowed.

        That waits for the device once, as the scaler itself would in its step.
        """
        self._unscaled = [one for one in optimizers if _has_gradients(one)] if self.scaler is not None else []
        if self.scaler is None or not self._unscaled:
            return False
        for optimizer in self._unscaled:
            self.scaler.unscale_(optimizer)
        states = self.scaler._per_optimizer_states
        return any(bool(found) for one in self._unscaled for found in states[id(one)]["found_inf_per_device"].values())

    def step(self, optimizer: torch.optim.Optimizer, own_step: Callable[..., Any] | None) -> bool:
        """Step an optimizer; returns whether it stepped (a scaler skips non-finite gradients)."""
        if self.scaler is None:
            optimizer.step() if own_step is None else own_step(optimizer)
            return True
        if own_step is not None:
            raise TrainingError("optimizer_step cannot be combined with precision='fp16': the GradScaler owns the step")
        if not _has_gradients(optimizer):  # which a scaler cannot judge; there is nothing to scale either
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
        """Adapt the scale once per step that had gradients to judge by."""
        if self.scaler is not None and self._unscaled:
            self.scaler.update()


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(param.grad is not None for group in optimizer.param_groups for param in group["params"])


def _all_on(model: torch.nn.Module, device: torch.device) -> bool:
    return all(tensor.device == device for tensor in (*model.parameters(), *model.buffers()))


def find_device(device: Any) -> torch.device:
    """What users give as a device, None meaning the best there is."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise TrainingError(f"{device!r} is no device: {error}") from error
    if found.type == "cuda" and found.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return found
