"""`loss_spike`: report steps whose loss is far above the previous losses."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated, Any

from annotated_types import Ge

from hookline.errors import ConfigError
from hookline.hooks.base import NamedHook
from hookline.run.control import RunControl

# Scales the median distance from the median to the standard deviation of a normal distribution.
MAD_TO_STD = 1.4826
# The smallest spread, as a share of the median: a loss that hardly moves has almost no spread, so any change would be a
# spike.
MIN_SPREAD = 1e-3


@dataclass(frozen=True)
class Spike:
    """A loss far above the previous ones."""

    step: int
    loss: float
    median: float
    """The median of the losses before it."""
    spreads: float
    """How far above the median it is, in spreads."""
    batch_idx: int
    dataloader_name: str

    def __str__(self) -> str:
        above = f"{self.spreads:.1f} spreads above the median {self.median:.4g}"
        return f"step {self.step}: loss {self.loss:.4g} is {above} (batch {self.batch_idx} of {self.dataloader_name!r})"


class LossSpike(NamedHook):
    """Reports a step whose loss is more than `factor` spreads above the median of the last losses, with its batch.

    The spread is the median distance from the median, scaled to equal the standard deviation of normally distributed
    losses; earlier spikes affect neither. Losses that are not finite are left to `nan_forensics`. Spikes are in
    `spikes`, in the record and in a warning. Each step waits for the device to read the loss. With several ranks, each
    compares the losses of its own batches, and with `stop_run` a spike on one of them stops all.

    Args:
        factor: Number of spreads above the median that counts as a spike.
        window: Number of previous losses to compare with.
        warmup: Number of losses to collect before any is judged.
        stop_run: Whether a spike ends the run.

    Raises:
        ConfigError: If a parameter has an invalid value.
    """

    built_in = True
    name = "loss_spike"
    needs: tuple[str, ...] = ("knows_loss",)

    def __init__(
        self,
        factor: Annotated[float, Ge(0.1)] = 8.0,
        window: Annotated[int, Ge(2)] = 100,
        warmup: Annotated[int, Ge(2)] = 20,
        stop_run: bool = False,
    ) -> None:
        self.factor, self.window, self.warmup, self.stop_run = factor, window, warmup, stop_run
        if warmup > window:
            raise ConfigError("warmup", f"expected at most the window, {window}; got {warmup}")
        if stop_run:
            self.needs = (*self.needs, "can_stop")
        self.spikes: list[Spike] = []
        self._recent: deque[float] = deque(maxlen=window)

    def on_train_start(self, resumed: bool = False) -> None:
        """Start over, unless the run is resumed."""
        if not resumed:
            self.spikes = []
            self._recent.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the losses to compare with and the spikes so far."""
        return {"recent": list(self._recent), "spikes": [asdict(spike) for spike in self.spikes]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._recent = deque(state["recent"], maxlen=self.window)
        self.spikes = [Spike(**spike) for spike in state["spikes"]]

    def on_step_end(self, trainer: RunControl, step: int, loss: float, batch_idx: int, dataloader_name: str) -> None:
        """Compare the step's loss with the previous ones."""
        if not math.isfinite(loss):
            return
        if len(self._recent) >= self.warmup:
            middle = median(self._recent)
            spread = MAD_TO_STD * median(abs(recent - middle) for recent in self._recent)
            spreads = (loss - middle) / max(spread, MIN_SPREAD * abs(middle), 1e-12)
            if spreads > self.factor:
                # Name the micro-batch of the step that has the highest loss.
                if window := trainer.window():
                    worst = max(window, key=lambda part: float(part.loss))
                    batch_idx, dataloader_name = worst.batch_idx, worst.loader
                spike = Spike(step, loss, middle, spreads, batch_idx, dataloader_name)
                self.spikes.append(spike)
                self.warn(str(spike), of_rank=True)
                # Every note has the current step, so the spike's is left out.
                self.note(trainer, "loss_spike", **{k: value for k, value in asdict(spike).items() if k != "step"})
                if self.stop_run:
                    trainer.request_stop(str(spike), by=self.registered_name)
        self._recent.append(loss)
