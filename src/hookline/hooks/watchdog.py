"""The stall watchdog: when a step hangs, every thread's stack goes into the record."""

from __future__ import annotations

import sys
import threading
import traceback
from time import monotonic
from typing import Any

from hookline.errors import ConfigError
from hookline.events.policy import logger
from hookline.registry.base import TrainingHook

LOOKS = 20  # how often it looks within the time after which a step counts as hanging
FRAMES_SHOWN = 12  # on the console; the record has all


class StallWatchdog(TrainingHook):
    """Writes all threads' stacks into the record when no batch, step or validation batch has come for `seconds`.

    A thread looks at a clock that events set: this costs a step well under a microsecond. Each stall is told once
    (event ``stall``, and a warning with the stack of the thread that trains), and again when it is over
    (``stall_over``). Processes of a DataLoader are not looked into: that the run waits for one is seen in its stack. A
    step that hangs inside code that never lets other threads run cannot be seen.
    """

    built_in = True
    name = "stall_watchdog"

    def __init__(self, seconds: float = 300.0) -> None:
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
            raise ConfigError("seconds", f"expected a number above 0, got {seconds!r}")
        self.seconds = seconds
        self.stalls = 0
        self._own_name = self.name
        self._beat = 0.0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def setup(self, name: str) -> None:
        """Sign notes with the name it goes by."""
        self._own_name = name

    def close(self) -> None:
        """The run is over: stop looking."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self._thread = None

    def on_train_start(self, trainer: Any) -> None:
        self.beat()
        self._over = threading.Event()
        arguments = (trainer, threading.get_ident(), self._over)
        self._thread = threading.Thread(target=self._look, args=arguments, name="hookline-watchdog", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        """Something went on; call it from long work of your own."""
        self._beat = monotonic()

    def on_train_batch_start(self) -> None:
        self._beat = monotonic()

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
        while not over.wait(self.seconds / LOOKS):
            beat = self._beat
            if monotonic() - beat > self.seconds:
                self._tell(trainer, training, monotonic() - beat)
                self._wait_out(trainer, beat, over)

    def _tell(self, trainer: Any, training: int, quiet: float) -> None:
        self.stalls += 1
        stacks = stacks_of_all_threads()
        self._note(trainer, "stall", seconds=round(quiet, 3), stacks=list(stacks.values()))
        where = "\n".join(stacks[training]["stack"][-FRAMES_SHOWN:]) if training in stacks else "its thread is gone"
        message = "hook %r: nothing has come for %.1f s at step %d; the thread that trains is here:\n%s"
        logger.warning(message, self._own_name, quiet, trainer.step, where)

    def _wait_out(self, trainer: Any, beat: float, over: threading.Event) -> None:
        """Until something goes on again, or the run ends."""
        while self._beat == beat and not over.wait(self.seconds / LOOKS):
            pass
        ended = monotonic() if self._beat == beat else self._beat
        self._note(trainer, "stall_over", seconds=round(ended - beat, 3))

    def _note(self, trainer: Any, kind: str, **fields: Any) -> None:
        if callable(note := getattr(trainer, "note", None)):
            note(kind, by=self._own_name, **fields)


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
