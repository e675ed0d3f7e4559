"""Send in the background: `BackgroundQueue`, which training never waits for, and a switch that suspends all sending."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from time import monotonic
from typing import Any, NamedTuple

_suspended: list[None] = []  # one for each block in which nothing is sent


@contextmanager
def sending_suspended() -> Iterator[None]:
    """Send nothing to webhooks and trackers inside a block, for runs that only compare hooks."""
    _suspended.append(None)
    try:
        yield
    finally:
        _suspended.pop()


def is_sending_suspended() -> bool:
    """Return whether nothing may leave this process now."""
    return bool(_suspended)


class TooLate(TimeoutError):
    """A call took too long."""


def call_within(seconds: float, call: Callable[[], Any], name: str) -> Any:
    """Call a function in a thread and return its result; the thread is abandoned if that takes too long.

    Raises:
        TooLate: If it took longer.
        BaseException: The function's exception.
    """
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # `answer.result` raises it in the thread that waits
            answer.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        if answer.done():  # the function itself has raised it
            raise
        raise TooLate from None


class _Item(NamedTuple):
    value: Any
    size: int
    amount: int


class BackgroundQueue:
    """A queue and its thread, until it is closed. Items that do not fit are dropped and counted.

    Args:
        work: Called once, in the thread, with the queue; it takes items until `take` returns none.
        limit: The maximum total size of all waiting items. If none is waiting, an item of any size is accepted.
        drop_oldest: Whether the oldest items make room for a new one; otherwise the new one is dropped.
        on_error: Called in the thread with the exception of `work`, unless the queue was abandoned before. Later items
            are ignored.
        name: The name of the thread.
    """

    def __init__(
        self,
        work: Callable[[BackgroundQueue], None],
        limit: int,
        *,
        drop_oldest: bool = False,
        on_error: Callable[[BaseException], None],
        name: str,
    ) -> None:
        self.dropped = self.left = 0
        """How much was dropped, and how much was left undone when the queue was closed."""
        self.is_closing = False
        self.is_abandoned = False
        """Whether the thread was abandoned, so that nothing waits for it."""
        self._work, self._limit, self._drop_oldest, self._on_error = work, limit, drop_oldest, on_error
        self._waiting: deque[_Item] = deque()
        self._size = self._in_hand = 0  # The size of all waiting items, and the amount in progress.
        self._take_at = 0.0
        self._changed, self._ended = threading.Condition(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, value: Any, size: int = 1, amount: int = 1) -> None:
        """Queue an item, which counts as `amount` if it is dropped or left over; returns at once."""
        with self._changed:
            if self.is_closing:
                return
            while self._waiting and self._size + size > self._limit:
                if not self._drop_oldest:
                    self.dropped += amount
                    return
                self.dropped += self._pop().amount
            self._waiting.append(_Item(value, size, amount))
            self._size += size
            self._changed.notify()

    def take(self, group: Callable[[Any], Any] | None = None, pause: float = 0.0) -> list[Any]:
        """Wait for items and return the next one, or all next ones of the same group; none at the end.

        Args:
            group: Returns the common key of items that are taken together.
            pause: Seconds since the last call in which items gather, unless the queue is half full or closed.
        """
        with self._changed:
            self._in_hand = 0
            self._changed.wait_for(lambda: self._waiting or self.is_closing)
            left = max(self._take_at - monotonic(), 0.0)
            self._changed.wait_for(lambda: self.is_closing or 2 * self._size > self._limit, left)
            taken: list[Any] = []
            while self._waiting and (
                not taken or (group is not None and group(self._waiting[0].value) == group(taken[0]))
            ):
                item = self._pop()
                taken.append(item.value)
                self._in_hand += item.amount
            if not self._waiting:  # items of another group come at once
                self._take_at = monotonic() + pause
            return taken

    def wait_for_close(self, seconds: float) -> None:
        """Wait for the given seconds, or until the queue is closed; for pauses between attempts."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_closing, seconds)

    def close(self, seconds: float) -> None:
        """Wait until everything is done, but at most the given seconds; the rest is counted in `left`.

        The thread is abandoned then: it ends with the process, or when the call it waits for returns.
        """
        with self._changed:
            self.is_closing = True
            self._changed.notify()
        try:
            # Not `join`: if Ctrl-C ends that, some versions of Python take the thread for one that has ended.
            if self._ended.wait(seconds):
                self._thread.join()
        finally:  # Ctrl-C ends the wait, too
            with self._changed:
                self.is_abandoned = True
                self.left = self._in_hand + sum(item.amount for item in self._waiting)
                self._clear()

    @property
    def is_alive(self) -> bool:
        """Whether the thread still has work to do."""
        return not self._ended.is_set()

    def _run(self) -> None:
        try:
            self._work(self)
        except BaseException as error:  # SystemExit, too: it would end the thread silently.
            with self._changed:
                self.is_closing = True
                self._clear()
                is_of_interest = not self.is_abandoned
            if is_of_interest:
                self._on_error(error)
        finally:
            self._ended.set()

    def _pop(self) -> _Item:
        item = self._waiting.popleft()
        self._size -= item.size
        return item

    def _clear(self) -> None:
        self._waiting.clear()
        self._size = 0
