"""How fast a run is, and what it waits for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from hookline.events.batches import count_samples
from hookline.hooks.parameters import number_or_none, whole_number
from hookline.registry.base import TrainingHook

MEGABYTE = 2**20


@dataclass(slots=True)
class Window:
    """What happened since the last report."""

    began: float
    step: int  # the last one before it
    tokens: int  # seen before its first batch
    left_out: float = 0.0  # seconds of validations, checkpoints and the turn of an epoch
    samples: int = 0
    begun: int = 0  # batches looked at, whose samples these are; on a schedule not all
    steps: int = 0  # ended
    batches: int = 0  # ended
    first_wait: float = 0.0  # for its first batch, which came before it
    waited: float = 0.0
    waits: int = 0

    @property
    def batches_per_step(self) -> float:
        return self.batches / self.steps if self.steps else 1.0


class ThroughputMonitor(TrainingHook):
    """Records samples and tokens a second, seconds a step, the wait for data, and the device's memory and utilisation.

    Every `log_every_n_steps`, and at the end for the steps that are left, it reports the mean since the last report, as
    ``throughput/…``; validations, checkpoints and the turns of epochs are left out. The wait for data is what passes
    between the end of a step, its hooks included, and the start of the next batch. Nothing waits for the device: a full
    queue makes the host wait as well, so the figures of a window are right, not those of one step.

    With `flops_per_token` or `flops_per_sample` (forward and backward) it adds ``tflops``, and with the device's
    `peak_flops` the share of it that is used, ``mfu``. Utilisation needs the package pynvml. On a schedule of its own
    (``every: 10``) it looks at the batches that are due and takes the others to be like them: samples and the wait for
    data are estimates, and so is all that is counted by step where a batch that is due stands in the midst of one. It
    still hears where every batch and step ends, from where the wait for the next one counts.
    """

    built_in = True
    name = "throughput"
    always_hears = ("on_train_batch_end", "on_step_end")

    def __init__(
        self,
        log_every_n_steps: int = 10,
        flops_per_token: float | None = None,
        flops_per_sample: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        self.log_every_n_steps = whole_number(log_every_n_steps, "log_every_n_steps")
        self.flops_per_token = number_or_none(flops_per_token, "flops_per_token", 0)
        self.flops_per_sample = number_or_none(flops_per_sample, "flops_per_sample", 0)
        self.peak_flops = number_or_none(peak_flops, "peak_flops", 1)
        self._window: Window | None = None
        self._ended = 0.0  # when the last micro-batch, or what is left out after it, did
        self._ended_in = -1  # the step of that micro-batch
        self._done = self._tokens = -1  # the last step whose end was heard, and the tokens seen by then
        self._on_cuda: bool | None = None  # a device takes 15 µs to tell its type, in the midst of other work
        self._knows_utilisation = True

    # ---- counting --------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Any, batch: Any, step: int, tokens_seen: int) -> None:
        """The batch is there: the wait for it is over, and the steps before it can be reported."""
        now, window = perf_counter(), self._window
        # Where it was switched off, it did not hear the micro-batch before.
        wait = now - self._ended if self._ended and step - self._ended_in <= 1 else None
        if window is None or step - 1 - window.step >= self.log_every_n_steps:
            tokens = tokens_seen - _tokens_in(batch, trainer)
            if window is not None:
                self._report(trainer, window, step - 1, tokens, now)
            window = self._window = Window(now, step - 1, tokens, first_wait=wait or 0.0)
        if wait is not None:
            window.waited += wait
            window.waits += 1
        window.begun += 1
        window.samples += count_samples(batch)

    def on_train_batch_end(self, step: int) -> None:
        self._ended, self._ended_in = perf_counter(), step
        if self._window is not None:
            self._window.batches += 1

    def on_step_end(self, step: int, tokens_seen: int) -> None:
        """Users' hooks have been called by now: what they took is no wait for data."""
        self._ended, self._done, self._tokens = perf_counter(), step, tokens_seen
        if self._window is not None:
            self._window.steps += 1

    def on_validation_start(self, step: int, tokens_seen: int) -> None:
        self._catch_up(step, tokens_seen)

    def on_validation_end(self) -> None:
        self._leave_out()

    def on_checkpoint_save(self, step: int, tokens_seen: int) -> None:
        self._catch_up(step, tokens_seen)
        self._leave_out()

    def on_epoch_end(self, step: int, tokens_seen: int) -> None:
        self._catch_up(step, tokens_seen)

    def on_epoch_start(self) -> None:
        self._leave_out()

    def _catch_up(self, step: int, tokens_seen: int) -> None:
        """Steps that passed while it was switched off were training."""
        if self._ended and step > self._done:
            self._ended, self._ended_in = perf_counter(), step
            self._done, self._tokens = step, tokens_seen

    def _leave_out(self) -> None:
        """What came since the last micro-batch was neither training nor waiting for data."""
        now = perf_counter()
        if self._window is not None and self._ended:
            self._window.left_out += now - self._ended
            self._ended = now

    def on_train_end(self, trainer: Any = None) -> None:
        """Report the steps since the last report."""
        if trainer is not None and self._window is not None and self._done > self._window.step:
            # The other windows end with the wait for a batch; this one has none behind it, but one before it.
            self._report(trainer, self._window, self._done, self._tokens, self._ended + self._window.first_wait)

    def close(self) -> None:
        self._window, self._ended, self._ended_in, self._done, self._on_cuda = None, 0.0, -1, -1, None

    # ---- reporting -------------------------------------------------------------------------------------------------

    def _report(self, trainer: Any, window: Window, step: int, tokens: int, now: float) -> None:
        seconds = max(now - window.began - window.left_out, 1e-9)
        steps = step - window.step
        samples = window.samples / window.begun * window.batches_per_step * steps
        rates = {
            "steps_per_s": steps / seconds,
            "samples_per_s": samples / seconds,
            "tokens_per_s": (tokens - window.tokens) / seconds,
        }
        step_seconds = seconds / steps
        values = {"step_seconds": step_seconds, **rates, **self._waits(window, step_seconds), **self._flops(rates)}
        if self._on_cuda is None:
            self._on_cuda = trainer.device.type == "cuda"
        for name, value in (*values.items(), *(self._device(trainer.device) if self._on_cuda else ())):
            trainer.log(f"throughput/{name}", value, step)

    def _waits(self, window: Window, step_seconds: float) -> dict[str, float]:
        if not window.waits:
            return {}
        # Per step, which may have several micro-batches; nobody knows how long the run's first was waited for.
        wait = window.waited / window.waits * window.batches_per_step
        return {"data_wait_seconds": wait, "data_wait_share": min(wait / step_seconds, 1.0)}

    def _flops(self, rates: Mapping[str, float]) -> dict[str, float]:
        given = (self.flops_per_token, "tokens_per_s"), (self.flops_per_sample, "samples_per_s")
        flops = sum(each * rates[per] for each, per in given if each is not None)
        if not flops:
            return {}
        mfu = {} if self.peak_flops is None else {"mfu": flops / self.peak_flops}
        return {"tflops": flops / 1e12, **mfu}

    def _device(self, device: torch.device) -> Iterator[tuple[str, float]]:
        yield "device_memory_mb", torch.cuda.memory_allocated(device) / MEGABYTE
        yield "device_memory_peak_mb", torch.cuda.max_memory_allocated(device) / MEGABYTE
        if self._knows_utilisation:
            try:
                yield "device_utilisation", torch.cuda.utilization(device) / 100
            except Exception:  # no pynvml, or a driver that does not tell: not asked again
                self._knows_utilisation = False


def _tokens_in(batch: Any, trainer: Any) -> int:
    """The tokens of a batch, as the run counts them; they are among those seen when the batch begins."""
    count = getattr(trainer, "count_tokens", None)
    return int(count(batch)) if callable(count) else 0
