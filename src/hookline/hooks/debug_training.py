"""`debug_training`: open the debugger at a NaN, and print the shapes of batches."""

from __future__ import annotations

from typing import Any

from hookline._console import print_line
from hookline.activations.debug import at_terminal, describe_tensors
from hookline.hooks.nan_forensics.diagnosis import Diagnosis, name_batch_tensors
from hookline.hooks.nan_forensics.dump import RecordedBatch
from hookline.hooks.nan_forensics.hook import NanForensics
from hookline.run.control import RunControl


class DebugHook(NanForensics):
    """Opens the debugger at a non-finite loss or gradient; without a terminal it writes a crash folder instead.

    The debugger opens before the optimizer step, with `trainer`, `batch`, `autopsy` and `reason` as local variables;
    quitting it ends the run. For conditions on activations use the forward hook ``debug``.

    Args:
        break_on_nan: Whether to open the debugger or write a folder; otherwise what was found is only reported.
        log_shapes: Print the shapes of a batch's tensors whenever they change.
        state: Whether the crash folder contains the weights.
        stop_run: Whether to end the run and skip the bad step.
    """

    built_in = True
    name = "debug_training"

    def __init__(
        self, break_on_nan: bool = True, log_shapes: bool = False, state: bool = True, stop_run: bool = False
    ) -> None:
        super().__init__(state=state, stop_run=stop_run)
        self.break_on_nan, self.log_shapes = break_on_nan, log_shapes
        self._shapes: dict[str, str] = {}

    def on_train_batch_start(self, trainer: RunControl, batch: Any, batch_idx: int, dataloader_name: str) -> None:
        """Record the batch, and print its shapes if they changed."""
        super().on_train_batch_start(trainer, batch, batch_idx, dataloader_name)
        if not self.log_shapes:
            return
        shapes = {name: describe_tensors(tensor)[0] for name, tensor in name_batch_tensors(batch).items()}
        if shapes != self._shapes:
            self._shapes = shapes
            print_line(f"from batch {batch_idx}: " + "; ".join(f"{name}: {text}" for name, text in shapes.items()))

    def _report(
        self, trainer: RunControl, recorded: RecordedBatch, reason: str, diagnosis: Diagnosis, write: bool = True
    ) -> None:
        """Open the debugger at a terminal, otherwise write a crash folder."""
        write = self.break_on_nan and not at_terminal()
        super()._report(trainer, recorded, reason, diagnosis, write)
        if self.break_on_nan and not write:
            _open_debugger(trainer, recorded.batch, diagnosis, reason)


def _open_debugger(trainer: RunControl, batch: Any, autopsy: Diagnosis, reason: str) -> None:
    """Open the debugger in a frame whose local variables are worth examining."""
    breakpoint()
