"""The stall watchdog: when a step hangs, every thread's stack goes into the record."""

from __future__ import annotations

import sys
import threading
import traceback
from time import monotonic
from typing import Any

from hookline.events.policy import logger
from hookline.hooks.named_hook import NamedHook, made_again
from hookline.hooks.parameters import number

LOOKS = 20  # how often it looks within the time after which a step counts as hanging
LONGEST = 30 * 24 * 3600.0  # seconds; more than a clock can wait for means that nobody looks
FRAMES_SHOWN = 12  # on the console; the record has all


class StallWatchdog(NamedHook):
    """Writes all threads' stacks into the record when no batch, step or validation batch has come for `seconds`.

    A thread looks at a clock that events set: this costs a step well under a microsecond. Each stall is told once (a
    warning with the stack of the thread that trains, and the event ``stall``), and again when it is over
    (``stall_over``). The sanity check before the first step is watched, too; what hooks do when the run has ended is
    not. Processes of a DataLoader are not looked into: that the run waits for one is seen in its stack. A step that
    hangs inside code that never lets other threads run cannot be seen.
    """

    built_in = True
    name = "stall_watchdog"
    hears_sanity_check = True

    def __init__(self, seconds: float = 300.0) -> None:
        self.seconds = number(seconds, "seconds", 0.01, LONGEST)
        self.stalls = 0
        self._beat = 0.0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> StallWatchdog:
        """A hook with the same parameters that watches nothing yet: a thread cannot be copied, and looks at one run."""
        return made_again(self, StallWatchdog, memo)

    def close(self) -> None:
        """The run is over, or nobody wants to know any more: stop looking."""
        thread, self._thread = self._thread, None
        self._over.set()
        if thread is not None:
            thread.join()

    def on_train_end(self) -> None:
        self.close()

    def on_train_start(self, trainer: Any) -> None:
        self._begin(trainer)

    def on_validation_start(self, trainer: Any = None) -> None:
        """That of the sanity check comes before on_train_start."""
        if getattr(trainer, "running", False):
            self._begin(trainer)

    def _begin(self, trainer: Any) -> None:
        self.beat()
        if self._thread is None:
            self._watch(trainer)

    def _watch(self, trainer: Any) -> None:
        """Begin to look, from a thread; the one that calls this is the one that trains."""
        self.beat()
        self._over = threading.Event()
        arguments = (trainer, threading.get_ident(), self._over)
        self._thread = threading.Thread(target=self._look, args=arguments, name="hookline-watchdog", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        """Something went on; call it from long work of your own."""
        self._beat = monotonic()

    def on_train_batch_start(self, trainer: Any = None) -> None:
        """A hook that was added in mid-run begins here."""
        self._beat = monotonic()
        if self._thread is None and trainer is not None:
            self._watch(trainer)

    def on_step_end(self) -> None:
        self._beat = monotonic()

    def on_validation_batch_start(self) -> None:
        self._beat = monotonic()

    def on_validation_end(self) -> None:
        self._beat = monotonic()

    def on_checkpoint_save(self) -> None:
        self._beat = monotonic()

    # ---- in its own thread -----------------------------------------------------------------------------------------

    def _look(self, trainer: Any, training: int, over: threading.Event) -> None:
        """Until the run has ended; after steps that somebody makes by hand, until the next one."""
        while self._goes_on(trainer, over):
            beat = self._beat
            if monotonic() - beat > self.seconds:
                self._tell(trainer, training, monotonic() - beat)
                self._wait_out(trainer, beat, over)
        if self._thread is threading.current_thread():
            self._thread = None

    def _goes_on(self, trainer: Any, over: threading.Event) -> bool:
        """Wait for a moment; whether the run is still training after it."""
        if over.wait(self.seconds / LOOKS) or not getattr(trainer, "running", True):
            return False
        return bool(getattr(trainer, "status", "training") == "training")

    def _tell(self, trainer: Any, training: int, quiet: float) -> None:
        """The console first: what makes the step hang may be the disk that the record is on."""
        self.stalls += 1
        stacks = stacks_of_all_threads()
        where = "\n".join(stacks[training]["stack"][-FRAMES_SHOWN:]) if training in stacks else "its thread is gone"
        message = "hook %r: nothing has come for %.1f s at step %d; the thread that trains is here:\n%s"
        logger.warning(message, self.called, quiet, trainer.step, where)
        self.note(trainer, "stall", seconds=round(quiet, 3), stacks=list(stacks.values()))

    def _wait_out(self, trainer: Any, beat: float, over: threading.Event) -> None:
        """Until something goes on again, or the run ends."""
        while self._beat == beat and self._goes_on(trainer, over):
            pass
        ended = monotonic() if self._beat == beat else self._beat
        self.note(trainer, "stall_over", seconds=round(ended - beat, 3))


def stacks_of_all_threads() -> dict[int, dict[str, Any]]:
    """Where every thread of this process is now, outermost frame first, by the thread's id."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        ident: {"thread": names.get(ident, "not Python's"), "stack": _lines(frame)}
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    }


def _lines(frame: Any) -> list[str]:
    return [f"{one.filename}:{one.lineno} in {one.name}: {one.line}" for one in traceback.extract_stack(frame)]
