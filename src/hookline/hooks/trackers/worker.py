"""Write rows of a record in a thread that training never waits for, from a queue of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import itemgetter
from sys import getsizeof
from typing import Any

from hookline.hooks.queue import BackgroundQueue

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
        on_failure: Called in the thread with what one of the functions has raised, unless it was abandoned before: the
            record is closed then, and has the event that the tracker was abandoned.
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
        self.close = on_close
        self.write_metrics, self.write_layers = partial(self._put, "metrics"), partial(self._put, "layers")
        self.write_events, self.write_media = partial(self._put, "events"), partial(self._put, "media")
        self._open, self._write, self._finish, self._skip = open, write, finish, skip
        self._run: Mapping[str, Any] = {}
        self.queue = BackgroundQueue(self._work, limit, on_error=on_failure, name="hookline-tracker")

    def _put(self, kind: str, rows: Sequence[Any]) -> None:
        """Queue rows; returns at once."""
        if kind not in self._skip and self.queue.is_alive:
            size = sum(map(len, rows)) * _ENTRY_BYTES if kind == "metrics" else sum(map(size_of, rows))
            self.queue.put((kind, rows), size, len(rows))

    def finish(self, run: Mapping[str, Any], seconds: float) -> None:
        """Wait until everything is written, at most some seconds."""
        self._run = dict(run)
        self.queue.close(seconds)

    def _work(self, queue: BackgroundQueue) -> None:
        self._open()
        while batches := queue.take(group=itemgetter(0), pause=PAUSE):
            self._write(batches[0][0], [row for _, rows in batches for row in rows])
        self._finish(self._run)


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
