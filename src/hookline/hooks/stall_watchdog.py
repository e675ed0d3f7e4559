"""`stall_watchdog`: write every thread's stack into the record when a step hangs."""

from __future__ import annotations

import sys
import threading
import traceback
from time import monotonic
from typing import Annotated, Any

from annotated_types import Ge, Le

from hookline.hooks.base import NamedHook
from hookline.run.control import RunControl

CHECKS = 20  # how often the thread checks within the time after which a step counts as stalled
MAX_SECONDS = 30 * 24 * 3600.0  # a lock cannot wait much longer
FRAMES_SHOWN = 12  # in the warning; the record has all of them


class StallWatchdog(NamedHook):
    """Writes all threads' stacks into the record when no batch, step or validation batch has come for `seconds`.

    A thread checks a timestamp that events set, which costs a step well under a microsecond. Each stall is reported
    once, by a warning with the stack of the training thread and by the event ``stall``, and its end by ``stall_over``.
    The sanity check before the first step is watched, too, but not the work of hooks after the run has ended. The
    stacks of a DataLoader's processes are not recorded; the run's own stack shows that it is waiting for one. A step
    that hangs in code that never releases the GIL cannot be detected.

    Args:
        seconds: The time after which a step counts as stalled.
    """

    built_in = True
    name = "stall_watchdog"
    runs_in_sanity_check = True

    def __init__(self, seconds: Annotated[float, Ge(0.01), Le(MAX_SECONDS)] = 300.0) -> None:
        self.seconds = seconds
        self.stalls = 0
        self._last_beat = 0.0
        self._thread: threading.Thread | None = None
        self._stopped: threading.Event | None = None  # tells the thread to end

    def __getstate__(self) -> dict[str, Any]:
        """Leave the registration and the thread, which watches one run, out of copies."""
        return {**vars(self), **dict.fromkeys(("_registered_name", "_thread", "_stopped"))}

    def close(self) -> None:
        """Stop the thread."""
        thread, self._thread = self._thread, None
        if thread is not None and self._stopped is not None:
            self._stopped.set()
            thread.join()

    on_train_end = close

    def _beat_and_watch(self, trainer: RunControl) -> None:
        """Note that the run is alive, and start the thread, which takes the calling thread for the one that trains.

        The thread may be running already, because the sanity check comes before `on_train_start`. A hook that was
        added during the run starts it at the next batch.
        """
        self._last_beat = monotonic()
        if self._thread is None:
            self._stopped = threading.Event()
            arguments = (trainer, threading.get_ident(), self._stopped)
            self._thread = threading.Thread(target=self._watch, args=arguments, name="hookline-watchdog", daemon=True)
            self._thread.start()

    on_train_start = on_train_batch_start = _beat_and_watch

    def on_validation_start(self, trainer: RunControl) -> None:
        """Start the thread for the sanity check."""
        if trainer.running:
            self._beat_and_watch(trainer)

    def beat(self) -> None:
        """Note that the run is alive; call it from long-running hooks."""
        self._last_beat = monotonic()

    on_step_end = on_validation_batch_start = on_validation_end = on_checkpoint_save = beat

    # ---- in the watchdog's thread ------------------------------------------------------------------------------------

    def _watch(self, trainer: RunControl, training_thread: int, stopped: threading.Event) -> None:
        """Check until the run has ended; after a step made by `training_step`, until that is over."""
        while self._wait_one_check(trainer, stopped):
            beat = self._last_beat
            if monotonic() - beat <= self.seconds:
                continue
            self.stalls += 1
            seconds, stacks = monotonic() - beat, stacks_of_all_threads()
            known = stacks.get(training_thread)
            where = "\n".join(known["stack"][-FRAMES_SHOWN:]) if known else "the training thread has ended"
            # Warn first, then record: the step may hang because of the disk that the record is on.
            problem = f"no progress for {seconds:.1f} s at step {trainer.step}; the training thread is here:\n{where}"
            self.warn(problem, of_rank=True)
            self.note(trainer, "stall", seconds=round(seconds, 3), stacks=list(stacks.values()))
            # The stall lasts until the next sign of life, or until the run ends without one.
            while self._last_beat == beat and self._wait_one_check(trainer, stopped):
                pass
            ended = monotonic() if self._last_beat == beat else self._last_beat
            self.note(trainer, "stall_over", seconds=round(ended - beat, 3))
        if self._thread is threading.current_thread():
            self._thread = None

    def _wait_one_check(self, trainer: RunControl, stopped: threading.Event) -> bool:
        """Wait until the next check, and return whether the run is still training."""
        if stopped.wait(self.seconds / CHECKS):
            return False
        return trainer.running and trainer.status == "training"


def stacks_of_all_threads() -> dict[int, dict[str, Any]]:
    """Return the stack of every other thread of this process by its id, outermost frame first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        ident: {
            "thread": names.get(ident, "not Python's"),
            "stack": [
                f"{call.filename}:{call.lineno} in {call.name}: {call.line}" for call in traceback.extract_stack(frame)
            ],
        }
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    }
