"""End a run cleanly on SIGTERM and SIGINT: the handler sets flags, the loop reads them at the next boundary."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from time import monotonic
from types import FrameType
from typing import Any

from torch.utils.data import get_worker_info

from hookline._terminal import begin_line
from hookline.record.outcome import TERMINATED

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Schedulers signal every process of a job, and torchrun passes on the signal that it gets itself, some time later, so
# each rank gets two signals for one request. When a person presses Ctrl-C, each SIGINT counts.
REPEAT_SECONDS = 10.0
ACKNOWLEDGED = {
    signal.SIGINT: "Ctrl-C: ending when {done}; press Ctrl-C again to end now",
    signal.SIGTERM: f"SIGTERM: ending when {{done}}; a second one after {REPEAT_SECONDS:g} s ends now",
}


class SignalHandler:
    """Handle the signals that arrive inside a ``with`` block; `exit` then does what the signal requested.

    Args:
        on_signal: Called with the name of the first signal. It may run between any two instructions of the run, even in
            the middle of a write, so it must only make assignments.
        console: Whether to print immediately that the first signal has arrived, and how to end without waiting.
        saves: Whether the run writes checkpoints, for the sentence that is printed.
    """

    def __init__(self, on_signal: Callable[[str], None], console: bool = False, saves: bool = True) -> None:
        self.caught: signal.Signals | None = None
        self.worker_error: Exception | None = None
        """What torch reported about a dead worker, if anything."""
        self.waits_for = "this step is saved" if saves else "this step is done"
        """The condition for the end of the run, for the printed sentence."""
        self._on_signal, self._console = on_signal, console
        self._pid = os.getpid()
        self._caught_at = 0.0
        self._previous: dict[int, Any] = {}
        self._child_handler: Any = None  # the SIGCHLD handler that ours calls
        self._replaced: Any = None  # the handler of SIGCHLD that was installed

    def __enter__(self) -> SignalHandler:
        """Install the handlers if this is the main thread; an ignored signal stays ignored."""
        for number in SIGNALS if threading.current_thread() is threading.main_thread() else ():
            previous = signal.getsignal(number)
            if previous in (signal.SIG_IGN, None):  # None: it was not set from Python, so it could not be restored
                continue
            signal.signal(number, self._handle)
            self._previous[number] = previous
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous handlers, unless another one was set in the meantime."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                with contextlib.suppress(ValueError):  # the run was closed by another thread
                    signal.signal(number, previous)
        self._previous.clear()
        # After SIGTERM the process is about to exit, and its workers may still be dying.
        if signal.getsignal(signal.SIGCHLD) == self._keep_error and self.caught != signal.SIGTERM:
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGCHLD, self._replaced)

    def hold_worker_errors(self) -> None:
        """Keep the handler of SIGCHLD from raising inside the run; call this when loaders have started.

        torch installs one that raises as soon as a worker of a DataLoader dies, whichever line the run is executing,
        perhaps in the middle of an optimizer step or a save. A signal to the process group ends the workers, too. The
        loader itself reports a dead worker when it is read, where no work is half done.
        """
        current = signal.getsignal(signal.SIGCHLD)
        if current == self._keep_error or not callable(current):  # torch installs its handler once per process
            return
        # Another run may have replaced it: one around this one, or one of this process that SIGTERM has ended.
        other = getattr(current, "__self__", None)
        self._child_handler = other._child_handler if isinstance(other, SignalHandler) else current
        self._replaced = current
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGCHLD, self._keep_error)

    def _keep_error(self, number: int, frame: FrameType | None) -> None:
        """Call torch's handler of SIGCHLD and store its exception; in a forked process, raise it."""
        try:
            self._child_handler(number, frame)
        except Exception as error:
            if os.getpid() != self._pid:
                raise
            self.worker_error = error

    def adopt(self, name: str | None) -> None:
        """End as if this process had caught the signal that another rank has caught; do nothing for None."""
        if name is not None and self.caught is None:
            self.caught, self._caught_at = signal.Signals[name], monotonic()

    def exit(self) -> None:
        """Do what the caught signal, if any, requested; call this after the run was closed."""
        if self.caught == signal.SIGTERM:
            raise SystemExit(TERMINATED)
        if self.caught is not None:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            self._handle_in_child(number, frame)
        elif self.caught is not None:  # a second signal: its sender cannot wait
            if number == signal.SIGINT:  # ends the code that a notebook runs, but not the notebook
                raise KeyboardInterrupt
            if monotonic() - self._caught_at >= REPEAT_SECONDS:
                os._exit(128 + number)
        else:
            self.caught, self._caught_at = signal.Signals(number), monotonic()
            self.hold_worker_errors()
            self._on_signal(self.caught.name)
            if self._console:
                line = ACKNOWLEDGED[self.caught].format(done=self.waits_for)
                with contextlib.suppress(Exception):  # stderr is closed, or not a file
                    # This bypasses Python's buffers, because the signal may have arrived inside them.
                    os.write(sys.stderr.fileno(), f"{begin_line()}hookline: {line}\n".encode())
            previous = self._previous.get(number)
            # At this point, Python's own handler for Ctrl-C would only raise KeyboardInterrupt.
            if callable(previous) and previous is not signal.default_int_handler:
                previous(number, frame)

    def _handle_in_child(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in a forked process. Ctrl-C reaches loader workers, too: they work until the run is over."""
        if number == signal.SIGINT and get_worker_info() is not None:
            return
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
