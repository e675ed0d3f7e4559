"""Write rows of a record in a thread that training never waits for, from a queue of bounded size."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from sys import getsizeof
from time import monotonic
from typing import Any

PAUSE = 2.0  # seconds between two calls of `write`, in which rows gather: MLflow takes 5 ms for a call with any rows
_ENTRY_BYTES = 200  # about what one entry of a dict or one cell of a table takes: the key, the value and their slots


class Worker:
    """A sink that queues rows, and the thread that writes them.

    Rows of two seconds are written in one call. If rows do not fit into the queue they are dropped and counted. If a
    function raises, the thread ends, and rows that come later are ignored.

    Args:
        open: Called first, in the thread.
        write: Called with a kind (metrics, layers, events or media) and rows of it, in the thread.
        finish: Called last, in the thread, with the fields of run.json.
        limit: How many bytes of rows may wait. A batch that comes when none waits is taken whatever its size.
        on_failure: Called in the thread with what one of the functions has raised, unless it was abandoned before.
        on_close: Called when the record is closed, on its thread, with the fields of run.json.
        skip: Kinds that are not taken.
    """

    def __init__(
        self,
        open: Callable[[], None],
        write: Callable[[str, Sequence[Any]], None],
        finish: Callable[[Mapping[str, Any]], None],
        limit: int,
        on_failure: Callable[[BaseException], None],
        on_close: Callable[[Mapping[str, Any]], None],
        skip: Collection[str] = (),
    ) -> None:
        self.dropped = self.unwritten = 0  # rows that did not fit, and rows that were left when it was abandoned
        self.close = on_close
        self._open, self._write, self._finish = open, write, finish
        self._limit, self._on_failure, self._skip = limit, on_failure, skip
        self._has_failed = self._is_abandoned = False
        self._waiting: deque[tuple[str, Sequence[Any], int]] = deque()
        self._bytes = self._in_hand = 0  # bytes that wait, and rows that are being written
        self._write_at = 0.0
        self._changed, self._ended = threading.Condition(), threading.Event()
        self._end: Mapping[str, Any] | None = None
        self._thread = threading.Thread(target=self._run, name="hookline-tracker", daemon=True)
        self._thread.start()

    def write_metrics(self, rows: Sequence[dict[str, Any]]) -> None:
        """Queue rows; returns at once, as the next three do."""
        self._put("metrics", rows)

    def write_layers(self, rows: Sequence[Any]) -> None:
        """Queue rows."""
        self._put("layers", rows)

    def write_events(self, rows: Sequence[dict[str, Any]]) -> None:
        """Queue rows."""
        self._put("events", rows)

    def write_media(self, rows: Sequence[Any]) -> None:
        """Queue rows."""
        self._put("media", rows)

    def finish(self, run: Mapping[str, Any], seconds: float) -> None:
        """Wait until everything is written, at most some seconds; what is not is counted in `unwritten`.

        The thread is abandoned then: it ends with the process or when what it waits for returns.
        """
        try:
            with self._changed:
                self._end = dict(run)
                self._changed.notify()
            # Not `join`: if Ctrl-C ends that, some versions of Python take the thread for one that has ended.
            if self._ended.wait(seconds):
                self._thread.join()
        finally:  # Ctrl-C ends the wait, too
            with self._changed:
                self._is_abandoned = True
                self.unwritten = self._in_hand + sum(len(rows) for _, rows, _ in self._waiting)
                self._clear()

    @property
    def is_alive(self) -> bool:
        """Whether the thread has something left to do."""
        return not self._ended.is_set()

    def _put(self, kind: str, rows: Sequence[Any]) -> None:
        with self._changed:
            if self._has_failed or self._end is not None or kind in self._skip:
                return
            size = sum(map(len, rows)) * _ENTRY_BYTES if kind == "metrics" else sum(map(size_of, rows))
            if self._waiting and self._bytes + size > self._limit:
                self.dropped += len(rows)
                return
            self._waiting.append((kind, rows, size))
            self._bytes += size
            self._changed.notify()

    def _run(self) -> None:
        try:
            self._open()
            while (batch := self._next()) is not None:
                self._write(*batch)
            self._finish(self._end or {})
        except BaseException as error:  # also SystemExit, with which a thread would end without a word
            with self._changed:
                self._has_failed = True
                self._clear()
                is_of_interest = not self._is_abandoned
            if is_of_interest:  # the record is closed otherwise, and has the event that the tracker was abandoned
                self._on_failure(error)
        finally:
            self._ended.set()

    def _next(self) -> tuple[str, Sequence[Any]] | None:
        """Return all rows of one kind that come next, waiting for them; None at the end."""
        with self._changed:
            self._in_hand = 0
            self._changed.wait_for(lambda: self._waiting or self._end is not None)
            self._changed.wait_for(self._is_urgent, timeout=max(self._write_at - monotonic(), 0.0))
            if not self._waiting:
                return None
            kind = self._waiting[0][0]
            found: list[Any] = []
            while self._waiting and self._waiting[0][0] == kind:
                _, rows, size = self._waiting.popleft()
                self._bytes -= size
                found += rows
            self._in_hand = len(found)
            if not self._waiting:  # rows of another kind come at once
                self._write_at = monotonic() + PAUSE
            return kind, found

    def _is_urgent(self) -> bool:
        return self._end is not None or 2 * self._bytes > self._limit

    def _clear(self) -> None:
        self._waiting.clear()
        self._bytes = 0


def size_of(row: Any) -> int:
    """Return about how many bytes a row of layers, events or media takes."""
    if isinstance(row, dict):
        return _size_of_values(row.values())
    if (values := getattr(row, "values", None)) is not None:
        return int(values.nbytes)
    content = row.content
    if (png := getattr(content, "png", None)) is not None:
        return len(png)
    return _size_of_values(content.columns) + sum(map(_size_of_values, content.rows))


def _size_of_values(values: Collection[Any]) -> int:
    """Return about how many bytes values and their slots take: numbers are alike, texts and lists are not."""
    size = len(values) * _ENTRY_BYTES
    for value in values:
        if isinstance(value, str):
            size += getsizeof(value)
        elif isinstance(value, dict):
            size += _size_of_values(value.values())
        elif isinstance(value, (list, tuple)):
            size += _size_of_values(value)
    return size
