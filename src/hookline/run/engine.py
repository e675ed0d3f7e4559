"""`Engine`: how a run places batches, runs backward, scales losses and steps optimizers; when: run/step.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hookline._tensors import map_tensors

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Engine:
    """Run on one device in one process; base of the engines that share a model between processes.

    Args:
        device: Where the model and the batches go.
        precision: 'fp32', 'bf16' or 'fp16'; the last one uses a GradScaler.
    """

    averages = False
    """Whether the ranks train on different batches, and the backward pass takes the mean of their gradients."""

    copies = 1
    """How many ranks share each batch, as in a tensor-parallel group."""

    forward_is_collective = False
    """Whether a forward pass waits for the other ranks; all of them then need the same number of passes."""

    def __init__(self, device: torch.device, precision: str = "fp32") -> None:
        self.device, self.precision = device, precision
        self.scaler: Any = torch.amp.GradScaler(device.type) if precision == "fp16" else None
        self._unscaled: _AllOptimizers | None = None  # in the current step
        # Loaders yield CPU tensors, so a run on the CPU does not search its batches for tensors to move.
        self.moves = device.type != "cpu"

    def first_with_batch(self, rank: int) -> int:
        """Return the lowest rank that has this rank's batches: it counts them; these ranks draw equal numbers."""
        return rank

    def prepare(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move the model to the device unless it is already on it."""
        tensors = (*model.parameters(), *model.buffers())
        return model if all(tensor.device == self.device for tensor in tensors) else model.to(self.device)

    def place(self, batch: Any) -> Any:
        """Move the tensors of a nested batch to the device; those that are already there are not touched."""
        return map_tensors(lambda tensor: tensor.to(self.device, non_blocking=True), batch) if self.moves else batch

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which forward passes run."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[self.precision])

    def eval_model(self, model: Any) -> Any:
        """Return the model as it is called in eval mode, where ranks may have different numbers of batches."""
        return model

    def free_whole_weights(self, model: torch.nn.Module) -> None:
        """Free the whole weights that a forward pass leaves for a backward pass; the next forward pass would use them.

        Does nothing unless the model is sharded.
        """

    def sync_gradients(self, model: Any, is_last: bool) -> None:
        """Prepare for a micro-batch: gradients are reduced over the ranks only after the last one of a step."""

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass, scaled if the precision needs it."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def unscale(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Unscale the gradients before hooks read them, and return whether one of them overflowed.

        This waits for the device once, as the scaler would in its own step.
        """
        if self.scaler is None:
            return False
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        if not any(param.grad is not None for group in groups for param in group["params"]):
            return False  # the scaler would raise an error; there is nothing to scale
        self._unscaled = _AllOptimizers(groups)
        self.scaler.unscale_(self._unscaled)
        self.scaler.step(self._unscaled)
        return not self._unscaled.stepped

    def step(self, optimizer: torch.optim.Optimizer, step_function: Callable[..., Any] | None = None) -> None:
        """Step an optimizer, by the user's replacement for ``optimizer.step()`` if there is one."""
        if step_function is None:
            optimizer.step()
        else:
            step_function(optimizer)

    def update_scale(self) -> None:
        """Update the loss scale, once per step that had gradients."""
        if self._unscaled is not None:
            self.scaler.update()
            self._unscaled = None


class _AllOptimizers:
    """All optimizers of a step as one, for the GradScaler.

    The scaler does not say whether it found an overflow, but it steps an optimizer only if it found none. The loop then
    steps or skips the real optimizers together.
    """

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        self.param_groups, self.stepped = param_groups, False

    def step(self) -> None:
        """Note that no gradient overflowed."""
        self.stepped = True
