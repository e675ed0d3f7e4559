"""Loss spikes: losses that stand out from those before them."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from hookline.errors import ConfigError
from hookline.events.policy import logger
from hookline.hooks.named_hook import NamedHook
from hookline.hooks.parameters import number, switch, whole_number

NORMAL = 1.4826  # makes the median distance from the median comparable to a standard deviation
FLOOR = 1e-3  # of the median: a loss that hardly moves has next to no spread, and everything would stand out


@dataclass(frozen=True)
class Spike:
    """A loss that stood out."""

    step: int
    loss: float
    median: float
    """Of the losses before it."""
    spreads: float
    """How far above the median it is, in spreads."""
    batch_idx: int
    dataloader_name: str

    def __str__(self) -> str:
        above = f"{self.spreads:.1f} spreads above the median {self.median:.4g}"
        return f"step {self.step}: loss {self.loss:.4g} is {above} (batch {self.batch_idx} of {self.dataloader_name!r})"


class LossSpike(NamedHook):
    """Notes a step whose loss stands out above the last `window` ones, with the batch that it came from.

    A loss stands out when it is more than `factor` spreads above their median. The spread is the median distance from
    the median, scaled so that it equals a standard deviation where losses are normally distributed: earlier spikes move
    neither. Nothing is judged before `warmup` losses are there; losses that are not finite are `nan_forensics`'
    business. Spikes are in `spikes`, in the record, and told on the console. With `stop_run` the run ends.

    Each step waits for the device to read the loss.
    """

    built_in = True
    name = "loss_spike"

    def __init__(self, factor: float = 8.0, window: int = 100, warmup: int = 20, stop_run: bool = False) -> None:
        self.factor = number(factor, "factor", 0.1)
        self.window, self.warmup = whole_number(window, "window", 2), whole_number(warmup, "warmup", 2)
        if warmup > window:
            raise ConfigError("warmup", f"expected at most the window, {window}; got {warmup}")
        self.stop_run = switch(stop_run, "stop_run")
        self.spikes: list[Spike] = []
        self._recent: deque[float] = deque(maxlen=window)

    def on_train_start(self, resumed: bool = False) -> None:
        """Another run has other losses."""
        if not resumed:
            self.spikes = []
            self._recent.clear()

    def state_dict(self) -> dict[str, Any]:
        """The losses it compares with."""
        return {"recent": list(self._recent), "spikes": [asdict(spike) for spike in self.spikes]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on comparing where the run left off."""
        self._recent = deque(state["recent"], maxlen=self.window)
        self.spikes = [Spike(**spike) for spike in state["spikes"]]

    def on_step_end(self, trainer: Any, step: int, loss: float, batch_idx: int, dataloader_name: str) -> None:
        if not math.isfinite(loss):
            return
        if len(self._recent) >= self.warmup:
            middle, spreads = self._distance(loss)
            if spreads > self.factor:
                place = _worst_of_window(trainer, batch_idx, dataloader_name)
                self._tell(trainer, Spike(step, loss, middle, spreads, *place))
        self._recent.append(loss)

    def _distance(self, loss: float) -> tuple[float, float]:
        """The median of the losses before, and how many spreads above it this one is."""
        middle = median(self._recent)
        spread = NORMAL * median(abs(one - middle) for one in self._recent)
        return middle, (loss - middle) / max(spread, FLOOR * abs(middle), 1e-12)

    def _tell(self, trainer: Any, spike: Spike) -> None:
        self.spikes.append(spike)
        logger.warning("hook %r: %s", self.called, spike)
        fields = asdict(spike)
        del fields["step"]  # a note carries the run's own
        self.note(trainer, "loss_spike", **fields)
        if self.stop_run:
            trainer.request_stop(str(spike), by=self.called)


def _worst_of_window(trainer: Any, batch_idx: int, dataloader_name: str) -> tuple[int, str]:
    """Of the micro-batches that a step was made of, the one with the highest loss; the last one is given."""
    window = getattr(getattr(trainer, "moment", None), "window", None)
    if not isinstance(window, list) or not window:
        return batch_idx, dataloader_name
    worst = max(window, key=lambda part: float(part.loss))
    return worst.batch_idx, worst.loader
