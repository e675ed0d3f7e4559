"""`profiler`: trace a few steps with torch.profiler."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import ClassVar
from weakref import WeakSet

import torch
from torch import profiler

from hookline._parameters import NonNegativeInt, PositiveInt
from hookline.core.schedule import Quantity, Schedule
from hookline.errors import ConfigError
from hookline.hooks.base import NamedHook
from hookline.run.control import RunControl


class Profiler(NamedHook):
    """Writes torch.profiler traces of a few steps into ``traces/`` in the run's directory.

    A trace opens in Perfetto or in chrome://tracing. Outside the traced steps and their warm-up, the hook is not called
    at all. Traced steps are slower, more so with `with_stack`. On a different schedule (``every: 1000``) each due step
    becomes a trace, or each due micro-batch if the schedule counts batches, tokens or seconds.

    Args:
        first_step: The step at which a trace starts, or a list of these.
        steps: How many steps a trace covers.
        warmup: Number of steps before each trace in which the profiler warms up.
        record_shapes: Record the shapes of operators' inputs.
        profile_memory: Record allocations.
        with_stack: Record Python stacks.
        directory: Where to write, instead of the run's directory.

    Raises:
        ConfigError: If a parameter has an invalid value or traces overlap.
    """

    built_in = True
    name = "profiler"
    needs = ("knows_batches",)
    ranks = "zero"
    _active: ClassVar[WeakSet[Profiler]] = WeakSet()  # The profilers that are tracing now.

    def __init__(
        self,
        first_step: PositiveInt | Sequence[PositiveInt] = 10,
        steps: PositiveInt = 3,
        warmup: NonNegativeInt = 1,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        directory: str | None = None,
    ) -> None:
        self.first_step = sorted(first_step) if isinstance(first_step, Sequence) else [first_step]
        if not self.first_step:
            raise ConfigError("first_step", "expected a step or a list of steps, got an empty list")
        self.steps, self.warmup, self.directory = steps, warmup, directory
        self.record_shapes, self.profile_memory, self.with_stack = record_shapes, profile_memory, with_stack
        self._ranges = [(first, first + steps - 1) for first in self.first_step]
        for (first, last), (following, _) in pairwise(self._ranges):
            if following <= last:
                why = f"the trace of step {first} lasts until step {last}, so none can start at {following}"
                raise ConfigError("first_step", f"{why}; leave at least steps={steps} between them")
        due = {step for first, last in self._ranges for step in range(max(first - warmup, 1), last + 1)}
        # With a schedule of exactly these steps, the others do not call the hook at all.
        self.schedule = Schedule(at=tuple(Quantity(step, "steps") for step in sorted(due)))
        self.traces: list[Path] = []
        self._profile: profiler.profile | None = None
        self._range = (0, 0)  # the first and last step of the current trace
        self._newest_step = 0
        self._ends_with_batch = False

    def on_train_batch_start(self, trainer: RunControl, step: int) -> None:
        """Start a trace at its first micro-batch; end one whose last step was not reported."""
        if step > self._range[1]:
            self.close()
        self._newest_step = step
        if self._profile is not None:
            return
        first, last = self._range_at(trainer, step)
        if Profiler._active or torch._C._autograd._profiler_enabled():  # two at once would end the process
            # A trace without its warm-up is still a trace, so the warning is only about traced steps.
            if step >= first:
                self.warn(f"step {step} is not traced, because another profiler is active", once="skipped")
            return
        self._range = max(first, step), last
        actions = profiler.ProfilerAction
        self._profile = profiler.profile(
            schedule=lambda index: actions.WARMUP if index < first - step else actions.RECORD,
            on_trace_ready=partial(self._write, trainer),
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
        )
        Profiler._active.add(self)
        self._advance(self._profile.start)

    def _range_at(self, trainer: RunControl, step: int) -> tuple[int, int]:
        """Return the steps of the trace that this step belongs to or warms up for; on another schedule, this step."""
        if self._has_own_schedule(trainer):
            return next(steps for steps in self._ranges if step <= steps[1])
        schedule = trainer.hooks.entry(self.registered_name).schedule
        marks = [mark for mark in (schedule.every, *schedule.at) if mark is not None]
        self._ends_with_batch = any(mark.unit not in ("steps", "epochs") for mark in marks)
        return step, step

    def _has_own_schedule(self, trainer: RunControl) -> bool:
        return bool(trainer.hooks.entry(self.registered_name).schedule == self.schedule)

    def on_train_batch_end(self) -> None:
        """End a trace by micro-batches, because the end of the step may not be due."""
        if self._ends_with_batch:
            self.close()

    def on_step_end(self, step: int) -> None:
        """Advance to the next step of the trace, or end it."""
        if step >= self._range[1]:
            self.close()
        elif self._profile is not None:
            self._advance(self._profile.step)

    def _advance(self, call: Callable[[], None]) -> None:
        """Start or step the profile; drop it if that fails, because using a half-started one ends the process."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # there is one cycle
                call()
        except BaseException:  # including Ctrl-C, which is raised again
            self._profile = None
            Profiler._active.discard(self)
            raise

    def on_train_end(self, trainer: RunControl, step: int) -> None:
        """End the current trace; warn if the run ended before the first one."""
        if step < self.first_step[0] and not trainer.is_trial_run and self._has_own_schedule(trainer):
            self.warn(f"nothing was traced: the run ended at step {step}, before first_step={self.first_step[0]}")
        self.close()

    def close(self) -> None:
        """End the current trace: stopping the profile writes it."""
        profile, self._profile = self._profile, None
        if profile is not None:
            try:
                profile.stop()
            finally:
                Profiler._active.discard(self)

    def _write(self, trainer: RunControl, profile: profiler.profile) -> None:
        if self._newest_step >= self._range[0]:  # a run may end in the warm-up
            trainer.record.defer(partial(self._export, trainer, profile, self._range[0]))

    def _export(self, trainer: RunControl, profile: profiler.profile, first: int) -> None:
        directory = self.output_path(trainer, "directory", "traces")
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / f"step-{first:08d}.json.gz"
            profile.export_chrome_trace(str(path))
            self.traces.append(path)
            self.note(trainer, "trace_written", path=str(path))
