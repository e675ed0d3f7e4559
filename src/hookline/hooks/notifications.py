"""Sending without waiting: messages queue up, a thread delivers them, and nothing that goes wrong reaches the run."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

from hookline.hooks.webhook import Undelivered

LONGEST_PAUSE = 60.0  # seconds between two attempts


class Outbox:
    """A bounded queue and the thread that empties it.

    When it is full the oldest message makes room, for the latest news matter most. A message is tried `retries` times
    more, with pauses that double from `backoff` seconds. `on_failure` hears, in the thread, what was given up and why.
    """

    def __init__(
        self,
        send: Callable[[bytes], None],
        *,
        limit: int = 100,
        retries: int = 3,
        backoff: float = 1.0,
        on_failure: Callable[[str], None] = lambda why: None,
    ) -> None:
        self.sent = self.failed = self.dropped = 0
        self._send, self._on_failure = send, on_failure
        self._limit, self._retries, self._backoff = limit, retries, backoff
        self._waiting: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False

    def put(self, message: bytes) -> None:
        """Queue a message; returns at once."""
        with self._changed:
            if len(self._waiting) >= self._limit:
                self._waiting.popleft()
                self.dropped += 1
            self._waiting.append(message)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="hookline-outbox", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self, patience: float) -> int:
        """Give what is left so many seconds to go out, without pauses between attempts; returns how much did not."""
        with self._changed:
            thread, self._closing = self._thread, True
            self._changed.notify_all()
        if thread is not None:
            thread.join(patience)
        with self._changed:
            left = len(self._waiting) + (thread is not None and thread.is_alive())
            self._waiting.clear()
            self._thread, self._closing = None, False
        return left

    def _work(self) -> None:
        me = threading.current_thread()
        while (message := self._next(me)) is not None:
            self._deliver(message, me)

    def _next(self, me: threading.Thread) -> bytes | None:
        """The next message; None when there will be none, or this thread was given up and another one serves."""
        with self._changed:
            while self._thread is me and not self._waiting and not self._closing:
                self._changed.wait()
            return self._waiting.popleft() if self._thread is me and self._waiting else None

    def _deliver(self, message: bytes, me: threading.Thread) -> None:
        """One message; whatever goes wrong with it, the thread lives on for the next."""
        try:
            self._try(message, me)
        except Undelivered as error:
            self._give_up(str(error))
        except Exception as error:
            self._give_up(f"{type(error).__name__} while sending")
        else:
            self.sent += 1

    def _try(self, message: bytes, me: threading.Thread) -> None:
        for attempt in range(self._retries):
            try:
                return self._send(message)
            except Undelivered as error:
                if not error.try_again or self._thread is not me:
                    raise
                self._pause(max(error.wait, min(self._backoff * 2**attempt, LONGEST_PAUSE)))
        return self._send(message)

    def _give_up(self, why: str) -> None:
        self.failed += 1
        with suppress(Exception):  # the listener's trouble is not the next message's
            self._on_failure(why)

    def _pause(self, seconds: float) -> None:
        """Wait, but not while somebody waits for the last messages to go out."""
        until = monotonic() + seconds
        with self._changed:
            while not self._closing and (left := until - monotonic()) > 0:
                self._changed.wait(left)
