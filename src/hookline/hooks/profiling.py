"""Where the time goes, in a trace: a window of steps under torch.profiler."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import profiler

from hookline.errors import ConfigError
from hookline.events.policy import logger
from hookline.events.schedule import Quantity, Schedule
from hookline.hooks.named_hook import NamedHook, is_trial
from hookline.hooks.parameters import switch, whole_number


class Profiler(NamedHook):
    """Writes a torch.profiler trace of a few steps, from each `first_step` on, into ``traces/`` in the run's directory.

    A trace opens in Perfetto or in chrome://tracing. The profiler is warmed up on `warmup` steps before each window;
    outside of the windows the hook is not called at all. The traced steps are slower, the more so with `with_stack`.
    On another schedule (``every: 1000``) each step that is due is a trace of its own, or each micro-batch, where that
    counts batches, tokens or seconds.
    """

    built_in = True
    name = "profiler"
    _at_work: ClassVar[WeakSet[Profiler]] = WeakSet()

    def __init__(
        self,
        first_step: int | Sequence[int] = 10,
        steps: int = 3,
        warmup: int = 1,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        directory: str | None = None,
    ) -> None:
        several = isinstance(first_step, Sequence) and not isinstance(first_step, str)
        firsts: list[Any] = list(first_step) if several else [first_step]  # type: ignore[arg-type]
        if not firsts:
            raise ConfigError("first_step", "expected a step, or a list of steps; got none")
        self.first_step = sorted(whole_number(first, "first_step") for first in firsts)
        self.steps, self.warmup = whole_number(steps, "steps"), whole_number(warmup, "warmup", 0)
        self.record_shapes, self.with_stack = switch(record_shapes, "record_shapes"), switch(with_stack, "with_stack")
        self.profile_memory, self.directory = switch(profile_memory, "profile_memory"), directory
        self._windows = [(first, first + steps - 1) for first in self.first_step]
        self._refuse_overlaps()
        heard = {step for first, last in self._windows for step in range(max(first - warmup, 1), last + 1)}
        self.schedule = Schedule(at=tuple(Quantity(step, "steps") for step in sorted(heard)))
        self._warm_ups = heard.difference(step for first, last in self._windows for step in range(first, last + 1))
        self.traces: list[Path] = []
        self._profile: profiler.profile | None = None
        self._trainer: Any = None
        self._window = (0, 0)  # the first and the last step of the trace that is being made
        self._reached = 0  # the newest step that was heard of
        self._ends_with_the_batch = self._told = self._told_left_out = False

    def _refuse_overlaps(self) -> None:
        for (first, last), (following, _) in pairwise(self._windows):
            if following <= last:
                why = f"the trace from step {first} on lasts until step {last}, so none can begin at {following}"
                raise ConfigError("first_step", f"{why}; leave at least steps={self.steps} between them")

    def on_train_batch_start(self, trainer: Any, step: int) -> None:
        """The first micro-batch of a window opens it; one whose end was not heard ends here."""
        if step > self._window[1]:
            self._finish()
        self._reached = step
        if self._profile is None and not self._is_left_out(trainer, step):
            self._trainer, self._window = trainer, self._window_at(trainer, step)
            self._profile = self._make_profile(self._window[0] - step)
            Profiler._at_work.add(self)
            self._go_on(self._profile.start)

    def _is_left_out(self, trainer: Any, step: int) -> bool:
        """Whether another profiler is at work, of which there can be only one: two would end the process."""
        if not Profiler._at_work and not torch._C._autograd._profiler_enabled():
            return False
        warms_up = step in self._warm_ups and self._is_on_its_own_schedule(trainer)  # without it a window is no loss
        if not warms_up and not self._told_left_out:
            self._told_left_out = True
            logger.warning("hook %r: step %d is not traced, because another profiler is at work", self.called, step)
        return True

    def _window_at(self, trainer: Any, step: int) -> tuple[int, int]:
        """The window that begins here or is warmed up for; on another schedule than its own, this step alone."""
        if not self._is_on_its_own_schedule(trainer):
            schedule = trainer.hooks.entry(self.called).schedule
            marks = [mark for mark in (schedule.every, *schedule.at) if mark is not None]
            self._ends_with_the_batch = any(mark.unit not in ("steps", "epochs") for mark in marks)
            return step, step
        first, last = next(window for window in self._windows if step <= window[1])
        return max(first, step), last

    def _is_on_its_own_schedule(self, trainer: Any) -> bool:
        return bool(trainer.hooks.entry(self.called).schedule == self.schedule)

    def _make_profile(self, warmup: int) -> profiler.profile:
        return profiler.profile(
            schedule=lambda index: profiler.ProfilerAction.WARMUP if index < warmup else profiler.ProfilerAction.RECORD,
            on_trace_ready=self._write,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
        )

    def on_train_batch_end(self) -> None:
        """Of a schedule that counts something smaller than steps, the end of this one may not be heard."""
        if self._ends_with_the_batch:
            self._finish()

    def on_step_end(self, step: int) -> None:
        """One step more in the trace; the window ends with the last of its steps."""
        if step >= self._window[1]:
            self._finish()
        elif self._profile is not None:
            self._go_on(self._profile.step)

    def _go_on(self, proceed: Callable[[], None]) -> None:
        """Start or go on tracing; where that fails, without this profile: one that has half begun ends the process."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # between cycles; there is one
                proceed()
        except BaseException:
            self._profile = None
            Profiler._at_work.discard(self)
            raise

    def on_train_end(self, trainer: Any, step: int) -> None:
        """End the trace that is being made; if the run was over before its first window, say so."""
        if step < self.first_step[0] and not is_trial(trainer) and self._is_on_its_own_schedule(trainer):
            why = f"the run ended at step {step}, before first_step={self.first_step[0]}"
            logger.warning("hook %r: nothing was traced: %s", self.called, why)
        self._finish()

    def close(self) -> None:
        self._finish()
        self._trainer = None

    def _finish(self) -> None:
        """Stop tracing; what has been traced is written."""
        profile, self._profile = self._profile, None
        if profile is not None:
            try:
                profile.stop()
            finally:
                Profiler._at_work.discard(self)

    def _write(self, profile: profiler.profile) -> None:
        directory = self._where()
        if directory is not None and self._reached >= self._window[0]:  # a run may end in the warm-up
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / f"step-{self._window[0]:08d}.json.gz"
            profile.export_chrome_trace(str(path))
            self.traces.append(path)
            self.note(self._trainer, "trace_written", path=str(path))

    def _where(self) -> Path | None:
        """The directory to write to; None, said once, when the run keeps no record on disk and nobody gave one."""
        if is_trial(self._trainer):  # which writes nothing
            return None
        if self.directory is not None:
            return Path(self.directory)
        if self._trainer.run_dir is not None:
            return Path(self._trainer.run_dir) / "traces"
        if not self._told:
            self._told = True
            logger.warning("%s writes nothing: this run keeps no record on disk; give it a directory", self.called)
        return None
