"""The run as a plain dictionary, for hooks that name `state`; brought up to date when one of them is called."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer


class RunState:
    """One dictionary for as long as the trainer lives; hooks may add keys."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._values: dict[str, Any] = {}

    def refresh(self) -> dict[str, Any]:
        """The dictionary, with our keys as they are now. Waits for the device: two of them are losses."""
        trainer, moment = self._trainer, self._trainer.moment
        self._values.update(
            model=trainer.model,
            optimizer=trainer.optimizers[0],
            device=trainer.device,
            current_epoch=moment.epoch,
            current_batch_idx=max(moment.training["batch_idx"], 0),
            latest_loss=self._safely(lambda: moment.training_loss),
            avg_loss=self._safely(trainer.loop.losses.mean),
            model_params=sum(parameter.numel() for parameter in trainer.model.parameters()),
            status=trainer.status,
        )
        return self._values

    def _safely(self, read: Callable[[], float]) -> float:
        """A loss; after a device error it can no longer be read, and closing events must still fire."""
        try:
            return read()
        except RuntimeError:
            if self._trainer.status != "error":
                raise
            return math.nan
