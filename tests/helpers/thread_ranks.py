"""Ranks that are threads of one process, for tests of what ranks agree on, without processes and sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from hookline.ranks import Ranks


class Board:
    """Where the threads put what they pass to each collective, in the order of their calls."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.passed: dict[int, list[Any]] = {}
        self.changed = threading.Condition()

    def put(self, call: int, rank: int, value: Any) -> None:
        with self.changed:
            self.passed.setdefault(call, [None] * self.world_size)[rank] = (value,)
            if all(self.passed[call]):
                self.changed.notify_all()

    def take(self, call: int) -> list[Any]:
        with self.changed:
            arrived = self.changed.wait_for(lambda: all(self.passed.get(call, [None])), timeout=300)
            assert arrived, f"call {call}: not all ranks have made it: {self.passed.get(call)}"
            return [value for (value,) in self.passed[call]]


class ThreadRanks(Ranks):
    """One rank: a thread."""

    act_together = True

    def __init__(self, rank: int, board: Board) -> None:
        super().__init__(rank, board.world_size, local_rank=rank)
        self._board, self._calls = board, 0

    def _pass(self, value: Any) -> int:
        self._calls += 1
        self._board.put(self._calls, self.rank, value)
        return self._calls

    def gather(self, value: Any) -> list[Any]:
        return self._board.take(self._pass(value))

    def total(self, numbers: Sequence[Any]) -> list[Any]:
        return self.send(numbers)()

    def send(self, numbers: Sequence[int]) -> Callable[[], list[int]]:
        call = self._pass(list(numbers))
        return lambda: [sum(column) for column in zip(*self._board.take(call), strict=True)]


def run_on_threads(function: Callable[[ThreadRanks], Any], world_size: int) -> list[Any]:
    """Call a function on every rank, each in its thread, and return the results by rank; the first error is raised."""
    board, results, errors = Board(world_size), [None] * world_size, []

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadRanks(rank, board))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
