"""`throughput`: record how fast a run is, how long it waits for data, and what the device is doing."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

from hookline import _checks, _device
from hookline._tensors import count_samples
from hookline.core.base import TrainingHook
from hookline.core.run_control import RunControl
from hookline.hooks.base import period

MEGABYTE = 2**20
REDUCTIONS = {
    "samples_per_s": "sum", "tokens_per_s": "sum", "tflops": "sum",
    "device_memory_mb": "max", "device_memory_peak_mb": "max",
}  # fmt: skip
"""How the figures of several ranks become one; others are means. If the ranks share each batch, a sum is rank 0's."""


@dataclass(slots=True)
class Interval:
    """What happened since the last report."""

    started: float
    step: int  # the last step before it
    tokens: int  # the tokens before its first batch
    excluded: float = 0.0  # seconds of validations, checkpoints and the time between epochs
    samples: int = 0
    batches_started: int = 0  # those that `samples` counts; on a schedule not all
    steps: int = 0  # ended
    batches: int = 0  # ended
    first_wait: float = 0.0  # for its first batch, which came before the interval
    waited: float = 0.0
    waits: int = 0

    @property
    def batches_per_step(self) -> float:
        return self.batches / self.steps if self.steps else 1.0


class ThroughputMonitor(TrainingHook):
    """Records samples and tokens per second, seconds per step, the wait for data, and device memory and utilisation.

    Each report is the mean since the last one, as ``throughput/…``, without validations, checkpoints and the time
    between epochs. The wait for data is the time from the end of a step, including its hooks, to the start of the next
    batch. Nothing waits for the device: a full queue makes the host wait as well, so the figures of a report are right,
    while those of a single step would not be. Utilisation needs the package pynvml.

    With several ranks, samples, tokens and operations per second are those of all ranks together, the memory is that of
    the rank with the most, and times, shares and ``throughput/mfu`` are means over the ranks.

    Registered as an object on a schedule (``add_hook(ThroughputMonitor(), every=10)``), only batches that are due are
    counted and the others are assumed to be like them: samples and the wait for data are estimates, and so are figures
    per step if a due batch is in the middle of one.

    Args:
        log_every_n_steps: The same as `every`; how often to report; the remaining steps are reported at the end.
        flops_per_token: Floating-point operations of forward and backward, for ``throughput/tflops``.
        flops_per_sample: The same per sample.
        peak_flops: What the device can do per second, for the share that is used, ``throughput/mfu``.
        every: How often to report, in steps.
    """

    built_in = True
    name = "throughput"
    every_aliases = ("log_every_n_steps",)
    # The wait for the next batch starts where these end, whether the hook is due or not.
    always_hears = ("on_train_batch_end", "on_step_end")

    def __init__(
        self,
        log_every_n_steps: int = 10,
        flops_per_token: float | None = None,
        flops_per_sample: float | None = None,
        peak_flops: float | None = None,
        every: int | str | None = None,
    ) -> None:
        self.log_every_n_steps = _checks.integer(log_every_n_steps, "log_every_n_steps", at_least=1)
        if (own := period(self, every, ("steps",))) is not None:
            self.log_every_n_steps = int(own.amount)
        self.flops_per_token = _checks.optional(_checks.number, flops_per_token, "flops_per_token", at_least=0)
        self.flops_per_sample = _checks.optional(_checks.number, flops_per_sample, "flops_per_sample", at_least=0)
        self.peak_flops = _checks.optional(_checks.number, peak_flops, "peak_flops", at_least=1)
        self._interval: Interval | None = None
        self._ended = 0.0  # when the last micro-batch ended, or what is excluded after it
        self._ended_in = -1  # the step of that micro-batch
        self._last_step = self._tokens = -1  # the last step that ended, and the tokens by then
        self._has_utilization = True

    # ---- counting ----------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: RunControl, batch: Any, step: int) -> None:
        """End the wait for the batch, and report the steps before it if a report is due."""
        now, interval = perf_counter(), self._interval
        # If the hook was disabled, it did not see the end of the micro-batch before.
        wait = now - self._ended if self._ended and step - self._ended_in <= 1 else None
        if interval is None or step - 1 - interval.step >= self.log_every_n_steps:
            tokens = trainer.rank_tokens - trainer.count_tokens(batch)  # those before this batch
            if interval is not None:
                self._report(trainer, interval, step - 1, tokens, now)
            interval = self._interval = Interval(now, step - 1, tokens, first_wait=wait or 0.0)
        if wait is not None:
            interval.waited += wait
            interval.waits += 1
        interval.batches_started += 1
        interval.samples += count_samples(batch)

    def on_train_batch_end(self, step: int) -> None:
        """Start the wait for the next batch."""
        self._ended, self._ended_in = perf_counter(), step
        if self._interval is not None:
            self._interval.batches += 1

    def on_step_end(self, step: int, trainer: RunControl) -> None:
        """Start the wait again: the time of users' hooks, which have run by now, is not a wait for data."""
        self._ended, self._last_step, self._tokens = perf_counter(), step, trainer.rank_tokens
        if self._interval is not None:
            self._interval.steps += 1

    def _catch_up(self, step: int, trainer: RunControl) -> None:
        """Count steps that were made while the hook was disabled as training."""
        if self._ended and step > self._last_step:
            self._ended = perf_counter()
            self._ended_in = self._last_step = step
            self._tokens = trainer.rank_tokens

    def _exclude(self) -> None:
        """Exclude the time since the last micro-batch, which was neither training nor waiting for data."""
        now = perf_counter()
        if self._interval is not None and self._ended:
            self._interval.excluded += now - self._ended
            self._ended = now

    on_validation_start = on_epoch_end = _catch_up
    on_validation_end = on_epoch_start = _exclude

    def on_checkpoint_save(self, step: int, trainer: RunControl) -> None:
        """Exclude the checkpoint."""
        self._catch_up(step, trainer)
        self._exclude()

    def on_train_end(self, trainer: RunControl) -> None:
        """Report the steps since the last report."""
        interval = self._interval
        if interval is not None and self._last_step > interval.step:
            # The other intervals end with the wait for a batch; this one has none after it, but one before it.
            self._report(trainer, interval, self._last_step, self._tokens, self._ended + interval.first_wait)

    def close(self) -> None:
        """Start over with the next run."""
        self._interval, self._ended, self._ended_in, self._last_step = None, 0.0, -1, -1

    # ---- reporting ---------------------------------------------------------------------------------------------------

    def _report(self, trainer: RunControl, interval: Interval, step: int, tokens: int, now: float) -> None:
        seconds = max(now - interval.started - interval.excluded, 1e-9)
        steps = step - interval.step
        samples = interval.samples / interval.batches_started * interval.batches_per_step * steps
        values = {
            "step_seconds": seconds / steps,
            "steps_per_s": steps / seconds,
            "samples_per_s": samples / seconds,
            "tokens_per_s": (tokens - interval.tokens) / seconds,
        }
        if interval.waits:  # the wait for the run's first batch is not known
            wait = interval.waited / interval.waits * interval.batches_per_step
            values |= {"data_wait_seconds": wait, "data_wait_share": min(wait / values["step_seconds"], 1.0)}
        flops = (self.flops_per_token or 0) * values["tokens_per_s"]
        flops += (self.flops_per_sample or 0) * values["samples_per_s"]
        if flops:
            values["tflops"] = flops / 1e12
            if self.peak_flops is not None:
                values["mfu"] = flops / self.peak_flops * trainer.data_ranks / trainer.ranks.world_size
        if _device.is_accelerator(trainer.device):  # takes 15 µs in a busy process, once per report
            values["device_memory_mb"] = (_device.memory_allocated(trainer.device) or 0) / MEGABYTE
            values["device_memory_peak_mb"] = (_device.max_memory_allocated(trainer.device) or 0) / MEGABYTE
            if self._has_utilization:
                try:
                    values["device_utilisation"] = _device.utilization(trainer.device)
                except Exception:  # no pynvml, or a driver that cannot tell, each with its error: do not ask again
                    self._has_utilization = False
        shares_batches = trainer.data_ranks < trainer.ranks.world_size
        for name, value in values.items():
            reduce: str | None = REDUCTIONS.get(name, "mean")
            reduce = None if reduce == "sum" and shares_batches else reduce
            trainer.log(f"throughput/{name}", value, step, reduce=reduce)
