"""SIGTERM and SIGINT end a run in order: the handler leaves a note, the loop finds it at the step's boundary."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """What has arrived during one run; `ask` is called for the first one and must do next to nothing."""

    def __init__(self, ask: Callable[[str], None]) -> None:
        self.caught: signal.Signals | None = None
        self._ask = ask
        self._pid = os.getpid()
        self._earlier: dict[int, Any] = {}

    def listen(self) -> None:
        """Take the handlers over, as far as this thread may; a signal that is ignored stays ignored."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            earlier = signal.getsignal(number)
            if earlier in (signal.SIG_IGN, None):  # None: a handler that Python did not set and could not put back
                continue
            with contextlib.suppress(ValueError):  # an interpreter that is not the process' main one
                signal.signal(number, self._heard)
                self._earlier[number] = earlier

    def stop_listening(self) -> None:
        """Put the earlier handlers back, unless somebody has set another one since."""
        for number, earlier in self._earlier.items():
            if signal.getsignal(number) == self._heard:
                with contextlib.suppress(ValueError):  # the run was closed by another thread
                    signal.signal(number, earlier)
        self._earlier.clear()

    def leave(self) -> None:
        """After the orderly close: what the signal asked for."""
        if self.caught == signal.SIGTERM:
            raise SystemExit(128 + self.caught)
        if self.caught is not None:
            raise KeyboardInterrupt

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            self._heard_by_child(number, frame)
        elif self.caught is not None:
            _leave_at_once(number)
        else:
            self.caught = signal.Signals(number)
            self._ask(self.caught.name)
            self._chain(number, frame)

    def _chain(self, number: int, frame: FrameType | None) -> None:
        """Call the handler that was there before; Python's own for Ctrl-C would only raise KeyboardInterrupt now."""
        earlier = self._earlier.get(number)
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(number, frame)

    def _heard_by_child(self, number: int, frame: FrameType | None) -> None:
        """A forked process has inherited this. Ctrl-C reaches loader workers, too: they go on until the run is over."""
        if number == signal.SIGINT and get_worker_info() is not None:
            return
        earlier = self._earlier.get(number)
        if callable(earlier):
            earlier(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _leave_at_once(number: int) -> None:
    """A second signal: whoever sent it cannot wait. Ctrl-C must not end a notebook, only what runs in it."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    os._exit(128 + number)


@contextlib.contextmanager
def obeying_signals(trainer: Trainer) -> Iterator[Signals]:
    """While a run lasts, the first signal asks it to save and stop; `leave` then does what the signal meant."""

    def ask(name: str) -> None:
        # Nothing but assignments: this may stand between any two instructions of the run, in the middle of a write too.
        if trainer.stop_reason is None:
            trainer.stop_reason, trainer.stopped_by = name, "signal"
        if trainer.checkpoint_dir is not None:
            trainer.save_asked.append(None)
        trainer.wants_attention = True

    signals = Signals(ask)
    signals.listen()
    try:
        yield signals
    finally:
        signals.stop_listening()
