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
        self._parameters = 0
        self._counted_at: tuple[int, int] | None = None  # the epoch, and how many tensors were trained

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
            model_params=self._count_parameters(),
            status=trainer.status,
        )
        return self._values

    def _count_parameters(self) -> int:
        """Counted in each epoch, and when others are trained: walking through a model takes longer than the rest."""
        now = self._trainer.moment.epoch, len(self._trainer.params)
        if now != self._counted_at:
            self._counted_at = now
            self._parameters = sum(parameter.numel() for parameter in self._trainer.model.parameters())
        return self._parameters

    def _safely(self, read: Callable[[], float]) -> float:
        """A loss; after a device error it can no longer be read, and closing events must still fire."""
        try:
            return read()
        except RuntimeError:
            if self._trainer.status != "error":
                raise
            return math.nan
