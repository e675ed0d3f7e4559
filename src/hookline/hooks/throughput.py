"""`throughput`: record how fast a run is, how long it waits for data, and what the device is doing."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge

from hookline import _device
from hookline._parameters import NonNegativeFloat, PositiveInt
from hookline.hooks.base import period
from hookline.hooks.console.times import StepReport, TimedHook
from hookline.run.control import RunControl

MEGABYTE = 2**20
REDUCTIONS = {
    "samples_per_s": "sum", "tokens_per_s": "sum", "tflops": "sum",
    "device_memory_mb": "max", "device_memory_peak_mb": "max",
}  # fmt: skip
"""How the figures of several ranks become one; others are means. If the ranks share each batch, a sum is rank 0's."""


class ThroughputMonitor(TimedHook):
    """Records samples and tokens per second, where the time of a step goes, and device memory and utilization.

    Each report is the mean since the last one, as ``throughput/…``, without validations, checkpoints and the time
    between epochs. The wait for data is the time from the end of a step, including its hooks, to the start of the next
    batch. Nothing waits for the device: a full queue makes the host wait as well, so the figures of a report are right,
    although those of a single step would not be. Utilization needs the package pynvml.

    The parts of a step are host times: ``data_wait_seconds``, ``forward_backward_seconds``, ``optimizer_seconds`` and
    ``hooks_seconds``. The second and third include the hooks called during them; the last is the time of all hook calls
    at the events of a step. On an accelerator the host only queues work, and waits when the queue is full, so the parts
    show where the host was, not what the device computed.

    With several ranks, samples, tokens and operations per second cover all ranks together. The memory is that of the
    rank with the most; times, shares and ``throughput/mfu`` are means over the ranks.

    If you register an object on a schedule (``add_hook(ThroughputMonitor(), every=10)``), it counts only the batches
    that are due, and assumes that the others are like them. Samples and the wait for data are then estimates, and so
    are figures per step if a due batch is in the middle of one.

    Args:
        log_every_n_steps: An older name of `every`. At the end of a run, the remaining steps are reported only if there
            are at least half as many of them, or no others: the mean of fewer would look like a change of speed.
        flops_per_token: Floating-point operations of the forward and backward pass, for ``throughput/tflops``.
        flops_per_sample: Floating-point operations of the forward and backward pass for one sample.
        peak_flops: The device's peak FLOP per second, from which ``throughput/mfu`` is computed.
        every: How often to report, in steps.
    """

    built_in = True
    name = "throughput"
    needs = ("knows_batches",)
    every_aliases = ("log_every_n_steps",)

    def __init__(
        self,
        log_every_n_steps: PositiveInt = 10,
        flops_per_token: NonNegativeFloat | None = None,
        flops_per_sample: NonNegativeFloat | None = None,
        peak_flops: Annotated[float, Ge(1)] | None = None,
        every: int | str | None = None,
    ) -> None:
        self.log_every_n_steps, self.peak_flops = log_every_n_steps, peak_flops
        self.flops_per_token, self.flops_per_sample = flops_per_token, flops_per_sample
        if (steps := period(self, every, ("steps",))) is not None:
            self.log_every_n_steps = int(steps.amount)
        self._least_steps = self.log_every_n_steps
        self._has_utilization, self._has_reported = True, False

    on_train_batch_end = TimedHook._end_batch
    on_epoch_start = on_validation_end = TimedHook._exclude

    def on_checkpoint_save(self, trainer: RunControl, step: int) -> None:
        """Exclude the checkpoint."""
        self._catch_up(trainer, step)
        self._exclude()

    def on_train_end(self, trainer: RunControl) -> None:
        """Record the steps since the last report, unless there are too few of them."""
        report = self._last_report(trainer)
        if report is not None and (2 * report.steps >= self.log_every_n_steps or not self._has_reported):
            self.use_report(trainer, report)

    def close(self) -> None:
        """Start over with the next run."""
        super().close()
        self._has_reported = False

    def use_report(self, trainer: RunControl, report: StepReport) -> None:
        """Record the means of an interval, and what the device is doing."""
        values, self._has_reported = report.values, True
        flops = (self.flops_per_token or 0) * values.get("tokens_per_s", 0.0)
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
                except Exception:  # no pynvml, or the driver has no figure, each with its own error: do not ask again
                    self._has_utilization = False
        for name, value in values.items():
            reduce = REDUCTIONS.get(name, "mean")
            counts = reduce != "sum" or trainer.counts_batch
            trainer.log(f"throughput/{name}", value if counts else 0.0, report.step, reduce=reduce)
