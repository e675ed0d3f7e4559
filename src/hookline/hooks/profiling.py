"""Where the time goes, in a trace: a window of steps under torch.profiler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import profiler

from hookline.events.policy import logger
from hookline.events.schedule import Quantity, Schedule
from hookline.hooks.metric_hook import note
from hookline.hooks.parameters import whole_number
from hookline.registry.base import TrainingHook


class Profiler(TrainingHook):
    """Writes a torch.profiler trace of a few steps, from each `first_step` on, into ``traces/`` in the run's directory.

    A trace opens in Perfetto or in chrome://tracing. The profiler is warmed up on `warmup` steps before each window;
    outside of the windows the hook is not called at all. The traced steps are slower, the more so with `with_stack`.
    On another schedule (``every: 1000``) each step that is due is a trace of its own.
    """

    built_in = True
    name = "profiler"

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
        firsts = [first_step] if isinstance(first_step, int) else list(first_step)
        self.first_step = [whole_number(first, "first_step") for first in firsts]
        self.steps, self.warmup = whole_number(steps, "steps"), whole_number(warmup, "warmup", 0)
        self.record_shapes, self.profile_memory, self.with_stack = record_shapes, profile_memory, with_stack
        self.directory = directory
        self._steps = {step for first in firsts for step in range(max(first - warmup, 1), first + steps)}
        self.schedule = Schedule(at=tuple(Quantity(step, "steps") for step in sorted(self._steps)))
        self.traces: list[Path] = []
        self._profile: profiler.profile | None = None
        self._trainer: Any = None
        self._first, self._own_name, self._told = 0, self.name, False

    def setup(self, name: str) -> None:
        """Take the name that messages shall use."""
        self._own_name = name

    def on_train_batch_start(self, trainer: Any, step: int) -> None:
        """The first micro-batch of a window opens it."""
        if self._profile is None:
            first = next((one for one in self.first_step if one - self.warmup <= step <= one), step)
            self._trainer, self._first = trainer, first
            self._profile = self._make_profile(first - step)
            self._profile.start()

    def _make_profile(self, warmup: int) -> profiler.profile:
        return profiler.profile(
            schedule=lambda index: profiler.ProfilerAction.WARMUP if index < warmup else profiler.ProfilerAction.RECORD,
            on_trace_ready=self._write,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
        )

    def on_step_end(self, step: int) -> None:
        """One step more in the trace; the window ends with the last of its steps."""
        if step + 1 not in self._steps:
            self._finish()
        elif self._profile is not None:
            self._profile.step()

    def on_train_end(self) -> None:
        self._finish()

    def close(self) -> None:
        self._finish()
        self._trainer = None

    def _finish(self) -> None:
        """Stop tracing; what has been traced is written."""
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()

    def _write(self, profile: profiler.profile) -> None:
        directory = self._where()
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / f"step-{self._first:08d}.json.gz"
            profile.export_chrome_trace(str(path))
            self.traces.append(path)
            note(self._trainer, "trace_written", by=self._own_name, path=str(path))

    def _where(self) -> Path | None:
        """The directory to write to; None, said once, when the run keeps no record on disk and nobody gave one."""
        if self.directory is not None:
            return Path(self.directory)
        if self._trainer.run_dir is not None:
            return Path(self._trainer.run_dir) / "traces"
        if not self._told:
            self._told = True
            logger.warning("%s writes nothing: this run keeps no record on disk; give it a directory", self._own_name)
        return None
