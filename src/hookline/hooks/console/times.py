"""`TimedHook`: a hook that measures how long steps take and where their time goes, for `throughput` and the console."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

from hookline._tensors import count_samples
from hookline.core.base import TrainingHook
from hookline.run.control import RunControl


@dataclass(slots=True)
class Interval:
    """The counts and times since the last report."""

    started: float
    step: int  # the last step before it
    tokens: int  # the tokens before its first batch
    hooks: float  # seconds that hooks took before it
    excluded: float = 0.0  # seconds of validations, checkpoints and the time between epochs
    samples: int = 0
    batches_started: int = 0  # The batches that `samples` counts; on a schedule, not all of them.
    steps: int = 0  # ended
    batches: int = 0  # ended
    first_wait: float = 0.0  # for its first batch, which came before the interval
    waited: float = 0.0
    waits: int = 0
    forward_backward: float = 0.0
    backwards: int = 0
    optimizer: float = 0.0
    optimizer_steps: int = 0


@dataclass(frozen=True)
class StepReport:
    """The means of an interval that ended with a step."""

    step: int
    values: dict[str, float]
    """``step_seconds``, ``steps_per_s``, ``samples_per_s``, ``tokens_per_s`` if there are tokens, and the parts of a
    step in seconds."""
    steps: int
    """How many steps the interval has."""


class TimedHook(TrainingHook):
    """Measures intervals of steps; a subclass overrides `use_report`, and calls `super()` in events it overrides.

    An interval is reported when both lengths are reached. Validations, checkpoints and the time between epochs do not
    count. On a schedule, the due batches represent the others.
    """

    # The wait for the next batch starts where these end, whether the hook is due or not.
    events_when_not_due = ("on_train_batch_end", "on_step_end")
    _least_steps, _least_seconds = 1, 0.0  # The shortest interval.
    _interval: Interval | None = None
    _ended = 0.0  # when the last micro-batch, or the excluded time after it, ended
    _ended_in = -1  # the step of that micro-batch
    _last_step = _tokens = -1  # the last step that ended, and the tokens by then
    _batch_started = _optimizer_started = 0.0  # 0 outside of these parts of a step
    _optimized_in = -1  # the last step with an optimizer step

    def use_report(self, trainer: RunControl, report: StepReport) -> None:
        """Use the means of an interval."""

    def close(self) -> None:
        """Start over with the next run."""
        self._interval = None
        self._ended = self._batch_started = self._optimizer_started = 0.0
        self._ended_in = self._last_step = self._tokens = self._optimized_in = -1

    # ---- the parts of a step -----------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: RunControl, batch: Any, step: int) -> None:
        """End the wait for the batch, and report the steps before it if that is due."""
        now, interval, report = perf_counter(), self._interval, None
        # If the hook was disabled, it did not see the end of the previous micro-batch.
        wait = now - self._ended if self._ended and step - self._ended_in <= 1 else None
        if interval is None or (
            step - 1 - interval.step >= self._least_steps and now - interval.started >= self._least_seconds
        ):
            tokens = trainer.rank_tokens - trainer.count_tokens(batch)  # Without this batch.
            hooks = _hook_seconds(trainer)
            if interval is not None:
                report = self._make_report(interval, step - 1, tokens, hooks, now)
            interval = self._interval = Interval(now, step - 1, tokens, hooks, first_wait=wait or 0.0)
        if wait is not None:
            interval.waited += wait
            interval.waits += 1
        interval.batches_started += 1
        interval.samples += count_samples(batch)
        self._batch_started = now
        if report is not None:
            self.use_report(trainer, report)

    def on_after_backward(self) -> None:
        """End the forward and backward pass of the batch."""
        if self._interval is not None and self._batch_started:
            self._interval.forward_backward += perf_counter() - self._batch_started
            self._interval.backwards += 1
        self._batch_started = 0.0

    def on_before_optimizer_step(self) -> None:
        """Start an optimizer step."""
        self._optimizer_started = perf_counter()

    def on_after_optimizer_step(self, step: int) -> None:
        """End an optimizer step; a step of several optimizers has several."""
        if self._interval is not None and self._optimizer_started:
            self._interval.optimizer += perf_counter() - self._optimizer_started
            self._interval.optimizer_steps += step != self._optimized_in
            self._optimized_in = step
        self._optimizer_started = 0.0

    def _end_batch(self, step: int) -> None:
        """Start the wait for the next batch; a subclass calls it in on_train_batch_end."""
        self._ended, self._ended_in = perf_counter(), step
        if self._interval is not None:
            self._interval.batches += 1

    def on_step_end(self, trainer: RunControl, step: int) -> None:
        """Start the wait again: the time of users' hooks, which have run by now, is not a wait for data."""
        self._ended, self._last_step, self._tokens = perf_counter(), step, trainer.rank_tokens
        if self._interval is not None:
            self._interval.steps += 1

    # ---- what does not count -----------------------------------------------------------------------------------------

    def _catch_up(self, trainer: RunControl, step: int) -> None:
        """Count steps during which the hook was disabled as training."""
        if self._ended and step > self._last_step:
            self._ended = perf_counter()
            self._ended_in = self._last_step = step
            self._tokens = trainer.rank_tokens

    on_validation_start = on_epoch_end = _catch_up

    def _exclude(self) -> None:
        """Exclude the time since the last micro-batch, which was neither training nor waiting for data.

        A subclass calls it when an epoch begins, a validation ends and a checkpoint was saved.
        """
        now = perf_counter()
        if self._interval is not None and self._ended:
            self._interval.excluded += now - self._ended
            self._ended = now

    # ---- reporting ---------------------------------------------------------------------------------------------------

    def _last_report(self, trainer: RunControl) -> StepReport | None:
        """Return a report of the steps since the last one, at the end of a run; None if there are none."""
        interval = self._interval
        if interval is None or self._last_step <= interval.step:
            return None
        # Other intervals end with the wait for a batch; this one has none after it, so the one before it counts.
        ended = self._ended + interval.first_wait
        return self._make_report(interval, self._last_step, self._tokens, _hook_seconds(trainer), ended)

    def _make_report(self, interval: Interval, step: int, tokens: int, hooks: float, now: float) -> StepReport:
        seconds = max(now - interval.started - interval.excluded, 1e-9)
        steps, per_step = step - interval.step, interval.batches / interval.steps if interval.steps else 1.0
        samples = interval.samples / interval.batches_started * per_step * steps
        values = {
            "step_seconds": seconds / steps,
            "steps_per_s": steps / seconds,
            "samples_per_s": samples / seconds,
        }
        if tokens > interval.tokens:
            values["tokens_per_s"] = (tokens - interval.tokens) / seconds
        if interval.waits:  # the wait for the run's first batch is not known
            wait = interval.waited / interval.waits * per_step
            values |= {"data_wait_seconds": wait, "data_wait_share": min(wait / values["step_seconds"], 1.0)}
        if interval.backwards:
            values["forward_backward_seconds"] = interval.forward_backward / interval.backwards * per_step
        if interval.optimizer_steps:
            values["optimizer_seconds"] = interval.optimizer / interval.optimizer_steps
        # The time of a removed hook is no longer known.
        values["hooks_seconds"] = max(hooks - interval.hooks, 0.0) / steps
        return StepReport(step, values, steps)


def _hook_seconds(trainer: RunControl) -> float:
    return sum(trainer.hooks.inner_seconds().values())
