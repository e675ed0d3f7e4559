"""Saving checkpoints."""

from __future__ import annotations

from typing import Any

from hookline.errors import ConfigError
from hookline.events.schedule import Reading, Schedule
from hookline.registry.base import TrainingHook


class CheckpointHook(TrainingHook):
    """Asks for a checkpoint every few epochs, every few steps, or both; a failure to save ends the run."""

    built_in = True
    name = "checkpoint"
    on_error = "raise"

    def __init__(self, save_every_n_epochs: int | None = 1, save_every_n_steps: int | None = None) -> None:
        self.save_every_n_epochs = _count(save_every_n_epochs, "save_every_n_epochs")
        self.save_every_n_steps = _count(save_every_n_steps, "save_every_n_steps")
        self._epochs = Schedule.parse(every=f"{save_every_n_epochs} epochs") if save_every_n_epochs else None
        if self.save_every_n_steps:
            self.schedule = Schedule.parse(every=self.save_every_n_steps)
        else:
            self.on_step_end = None  # type: ignore[assignment] # it need not hear the steps at all

    def on_step_end(self, trainer: Any) -> None:
        trainer.save()

    def on_epoch_end(self, trainer: Any, epoch: int) -> None:
        if self._epochs is not None and self._epochs.due(Reading(epochs=epoch + 1), Reading()):
            trainer.save()


def _count(value: Any, name: str) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(name, f"expected a whole number, at least 1, or null for never; got {value!r}")
    return value
