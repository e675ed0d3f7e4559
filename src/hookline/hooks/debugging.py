"""Debugging a run at the terminal: shapes of batches, and the debugger where a loss or a gradient goes bad."""

from __future__ import annotations

import bdb
from typing import Any

from hookline.activations.debug import at_terminal, described
from hookline.events.policy import logger
from hookline.hooks.autopsy import Autopsy, named_tensors
from hookline.hooks.crash import Scene
from hookline.hooks.forensics import NanForensics
from hookline.hooks.parameters import switch


class DebugHook(NanForensics):
    """Opens the debugger at a NaN loss or gradient, or writes a dump where nobody sits at a terminal; prints shapes.

    At a terminal `break_on_nan` opens the debugger before the optimizer's step, with `trainer`, `batch`, `autopsy` and
    `reason` at hand; quitting it ends the run. Elsewhere the dump is a crash folder, as `nan_forensics` writes it.
    Without `break_on_nan` the finding is only told. `log_shapes` prints what is in a batch whenever that changes.

    For conditions on activations there is the forward hook ``debug``.
    """

    built_in = True
    name = "debug_training"

    def __init__(
        self, break_on_nan: bool = True, log_shapes: bool = False, state: bool = True, stop_run: bool = False
    ) -> None:
        super().__init__(state=state, stop_run=stop_run)
        self.break_on_nan, self.log_shapes = switch(break_on_nan, "break_on_nan"), switch(log_shapes, "log_shapes")
        self._shapes: dict[str, str] = {}

    def on_train_batch_start(self, trainer: Any, batch: Any, batch_idx: int, dataloader_name: str) -> None:
        super().on_train_batch_start(trainer, batch, batch_idx, dataloader_name)
        if self.log_shapes:
            self._print_shapes(batch, batch_idx)

    def _print_shapes(self, batch: Any, batch_idx: int) -> None:
        shapes = {name: described(tensor)[0] for name, tensor in named_tensors(batch).items()}
        if shapes != self._shapes:
            self._shapes = shapes
            print(f"from batch {batch_idx}: " + "; ".join(f"{name}: {text}" for name, text in shapes.items()))

    def _keep_evidence(self, trainer: Any, scene: Scene, reason: str, autopsy: Autopsy) -> None:
        """A dump where nobody could answer a debugger; else the finding is told, and the debugger opened."""
        if self.break_on_nan and not at_terminal():
            return super()._keep_evidence(trainer, scene, reason, autopsy)
        logger.warning("step %d: %s; %s", trainer.step, reason, autopsy)
        self.note(trainer, "non_finite", reason=reason, autopsy=str(autopsy))
        return self._break(trainer, scene.batch, autopsy, reason) if self.break_on_nan else None

    def _break(self, trainer: Any, batch: Any, autopsy: Autopsy, reason: str) -> None:
        try:
            _pause(trainer, batch, autopsy, reason)
        except bdb.BdbQuit:  # an Exception: it would count as a failure of this hook, and the run would go on
            raise KeyboardInterrupt(f"quit in the debugger at {reason}, step {trainer.step}") from None


def _pause(trainer: Any, batch: Any, autopsy: Autopsy, reason: str) -> None:
    """Open the debugger in a frame that holds what one wants to look at."""
    breakpoint()
