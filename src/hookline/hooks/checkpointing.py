"""Saving checkpoints."""

from __future__ import annotations

from typing import Any

from hookline.registry.base import TrainingHook


class CheckpointHook(TrainingHook):
    """Asks for a checkpoint every few epochs, every few steps, or both; a failure to save ends the run."""

    built_in = True
    name = "checkpoint"
    on_error = "raise"

    def __init__(self, save_every_n_epochs: int | None = 1, save_every_n_steps: int | None = None) -> None:
        self.save_every_n_epochs = save_every_n_epochs
        self.save_every_n_steps = save_every_n_steps

    def on_step_end(self, trainer: Any, step: int) -> None:
        if self.save_every_n_steps and step % self.save_every_n_steps == 0:
            trainer.save()

    def on_epoch_end(self, trainer: Any, epoch: int) -> None:
        if self.save_every_n_epochs and (epoch + 1) % self.save_every_n_epochs == 0:
            trainer.save()
