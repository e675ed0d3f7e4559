"""End the process in time, whatever the client of a tracker does when the interpreter exits.

A client may leave threads that Python joins, exit handlers that wait for a server, and a service process, as wandb
does. What belongs to a client is interrupted when its time is over; what is the user's is waited for as always.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from time import monotonic, sleep
from types import FrameType
from typing import Any

GRACE = 1.0  # seconds at exit for a client that had its time before, or has failed
MAX_INTERRUPTS = 20  # then the process is ended without what is left to do
_PAUSE = 0.1  # seconds between two looks
_SIGNAL = getattr(signal, "SIGURG", None)  # ignored by default and hardly used; Windows has none
_WAITS = {"subprocess", "threading", "concurrent", "queue", "selectors", "asyncio"}


class LeftBehind(BaseException):
    """Interrupts what the main thread does for a client at exit."""


class ExitLimit:
    """Which clients may hold the process at exit, and for how long; there is one, for all trackers of the process."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}  # by package
        self._status = 0
        self._is_interrupting = False
        self._watcher: threading.Thread | None = None

    def add(self, packages: Iterable[str], seconds: float, status: int) -> None:
        """Limit what packages may take when the interpreter exits; call this in the main thread if possible.

        Args:
            packages: The client's packages.
            seconds: How long it may take; with at most `GRACE`, a wait of unknown origin counts as its own, too.
            status: The exit status if the process can only be killed: that of the run.
        """
        self._seconds.update(dict.fromkeys(packages, seconds))
        self._status = status
        with suppress(ValueError):  # not the main thread
            if _SIGNAL is not None and signal.getsignal(_SIGNAL) == signal.SIG_DFL:
                signal.signal(_SIGNAL, self._interrupt)
        if self._watcher is None or not self._watcher.is_alive():  # a forked process has no threads
            self._watcher = threading.Thread(target=self._watch, name="hookline-exit", daemon=True)
            self._watcher.start()

    def _watch(self) -> None:
        """Wait for the exit, and interrupt the main thread whenever it works for a client whose time is over."""
        main = threading.main_thread()
        while main.is_alive():
            sleep(_PAUSE)
        began, sent, report = monotonic(), 0, sys.unraisablehook

        def report_others(unraisable: Any) -> None:
            if unraisable.exc_type is not LeftBehind:
                report(unraisable)

        sys.unraisablehook = report_others
        while sent < MAX_INTERRUPTS:
            sleep(_PAUSE)
            passed = monotonic() - began
            if not self._is_held({package for package, seconds in self._seconds.items() if passed >= seconds}, main):
                continue
            end_awaited_process(main)
            sent += 1
            self._is_interrupting = True
            if _SIGNAL is not None and signal.getsignal(_SIGNAL) == self._interrupt:
                signal.pthread_kill(main.ident or 0, _SIGNAL)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(self._status)

    def _is_held(self, packages: set[str], main: threading.Thread) -> bool:
        """Return whether the main thread works or waits for one of the packages, and for nobody else."""
        if not packages:
            return False
        modules = modules_in(main)
        threads = [thread for thread in threading.enumerate() if not thread.daemon and thread is not main]
        if not all(modules_in(thread) & packages for thread in threads):  # the user's work in one of their threads
            return False
        is_unknown = any(self._seconds[package] <= GRACE for package in packages) and modules <= _WAITS
        return bool(modules) and bool(modules & packages or threads or is_unknown)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_interrupting:
            self._is_interrupting = False
            raise LeftBehind


def modules_in(thread: threading.Thread) -> set[str]:
    """Return the top-level modules of what a thread is doing."""
    frame, found = sys._current_frames().get(thread.ident or 0), set()
    while frame is not None:
        found.add(str(frame.f_globals.get("__name__")).partition(".")[0])
        frame = frame.f_back
    return found


def end_awaited_process(thread: threading.Thread) -> None:
    """End the process that a thread waits for: it would go on, and keep the pipes that it has inherited open."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        process = frame.f_locals.get("self")
        if isinstance(process, subprocess.Popen):
            with suppress(OSError):
                process.kill()
        frame = frame.f_back


exit_limit = ExitLimit()
