"""`Window`: the micro-batches of one optimizer step; here one micro-batch is a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from hookline.run.run import Run


class Window:
    """A window of one micro-batch. `AccumulationWindow` (trainer/window.py) has several, with weights."""

    size = 1
    """Micro-batches of a full window."""
    weight = 1.0
    """What the current micro-batch counts in the step's mean; without weight it has no part in it."""
    has_weight = True
    """Whether something in the window has a weight, on any rank."""
    rank_weight = 1.0
    """Weight of this rank's means in the mean over all ranks; 1.0 if all ranks count equally."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.count = 0  # micro-batches of the window so far
        self.is_complete = False  # whether the last of them was the window's last

    def begin(self, batch: Any) -> bool:
        """Prepare for a micro-batch, whose tensors are where the loader put them; return whether it begins a window."""
        self.count = 1
        return True

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a micro-batch with its share of the window."""
        self._run.engine.backward(loss)

    def finish_gradients(self) -> None:
        """Make the accumulated gradients those of the step: unscaled, and the mean over what was in the window."""

    def weigh(self, value: Any) -> Any:
        """Return what this rank adds to a mean over the ranks that weights each by what was in its window."""
        if self.rank_weight == 1.0:
            return value
        return value * self.rank_weight if self.rank_weight else 0.0  # the mean of nothing may be NaN

    def leave(self) -> None:
        """Leave the model as it was, also if the run fails inside a window."""

    def check_trained(self) -> None:
        """Raise TrainingError if no step of the run had anything to train on."""
