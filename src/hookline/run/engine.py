"""`Engine`: how a run places batches, runs backward and steps optimizers, as plain PyTorch does; when: run/step.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Engine:
    """Do what a plain loop does, on batches that are where they belong already.

    A host whose own loop does these things uses it as it is. Our trainer's engines (trainer/engine.py) place batches,
    scale losses and share models between processes.

    Args:
        device: Where the model is.
    """

    averages = False
    """Whether the ranks train on different batches, and the backward pass takes the mean of their gradients."""

    copies = 1
    """How many ranks share each batch, as in a tensor-parallel group."""

    forward_is_collective = False
    """Whether a forward pass waits for the other ranks; all of them then need the same number of passes."""

    scaler: Any = None
    """The GradScaler, if losses are scaled."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def first_with_batch(self, rank: int) -> int:
        """Return the lowest rank that has this rank's batches: it counts them, and all of these draw alike."""
        return rank

    def place(self, batch: Any) -> Any:
        """Return a batch with its tensors on the device."""
        return batch

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which forward passes run."""
        return nullcontext()

    def eval_model(self, model: Any) -> Any:
        """Return the model as it is called in eval mode, where ranks may have different numbers of batches."""
        return model

    def free_whole_weights(self, model: torch.nn.Module) -> None:
        """Free what a forward pass without a backward pass leaves behind: whole weights, which the next one would use.

        Does nothing unless the model is sharded.
        """

    def sync_gradients(self, model: Any, is_last: bool) -> None:
        """Prepare for a micro-batch: gradients are reduced over the ranks after the last one of a step only."""

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass."""
        loss.backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Unscale the gradients before hooks read them, and return whether one of them overflowed."""
        return False

    def step(self, optimizer: torch.optim.Optimizer, step_function: Callable[..., Any] | None = None) -> None:
        """Step an optimizer, by the user's replacement for ``optimizer.step()`` if there is one."""
        if step_function is None:
            optimizer.step()
        else:
            step_function(optimizer)

    def update_scale(self) -> None:
        """Update the loss scale, once per step that had gradients."""
