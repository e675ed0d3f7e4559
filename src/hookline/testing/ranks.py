"""Ranks that are threads of one process, without sockets: one at a time runs, until it needs another's number."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hookline.errors import RankError
from hookline.ranks import Ranks


class Board:
    """Where the threads put what they pass to each collective, in the order of their calls. One thread runs at a time.

    So random streams, which the threads share, are drawn from in the same order every time.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.passed: dict[int, list[Any]] = {}
        self.ended: list[int] = []  # ranks that will pass nothing more
        self.turn = threading.Condition()

    def put(self, call: int, rank: int, kind: str, value: Any) -> None:
        """Pass a value to a call of some kind."""
        with self.turn:
            self.passed.setdefault(call, [None] * self.world_size)[rank] = kind, value
            self.turn.notify_all()

    def end(self, rank: int) -> None:
        """Let the others know that a rank will pass nothing more."""
        with self.turn:
            self.ended.append(rank)
            self.turn.notify_all()

    def take(self, call: int) -> list[Any]:
        """Return the values that all ranks have passed to a call; raise RankError if one has ended without it."""
        with self.turn:
            arrived = self.turn.wait_for(lambda: all(self.passed[call]) or self._missing(call), timeout=300)
            if not arrived or not all(self.passed[call]):
                missing = self._missing(call) or [rank for rank, value in enumerate(self.passed[call]) if not value]
                raise RankError(f"rank {missing[0]} has not made the collective that the others wait in (call {call})")
            kinds, values = zip(*self.passed[call], strict=True)
            if len(set(kinds)) > 1:
                called = ", ".join(f"rank {rank} called {kind}()" for rank, kind in enumerate(kinds))
                raise RankError(f"the ranks are not in step: {called}")
            return list(values)

    def _missing(self, call: int) -> list[int]:
        return [rank for rank in self.ended if not self.passed[call][rank]]


class ThreadRanks(Ranks):
    """One rank: a thread. Hooks that use `torch.distributed` themselves need processes."""

    act_together = True

    def __init__(self, rank: int, board: Board) -> None:
        super().__init__(rank, board.world_size, local_rank=rank)
        self._board, self._calls, self._is_alone = board, 0, False

    def gather(self, value: Any) -> list[Any]:
        """Return what the ranks pass, by rank."""
        return self._pass("gather", value)()

    def first(self, make: Callable[[], Any]) -> Any:
        """Return what a function returns on rank 0."""
        return self.gather(make() if self.rank == 0 else None)[0]

    def send(self, numbers: Sequence[Any]) -> Callable[[], list[Any]]:
        """Begin to add up numbers."""
        receive = self._pass("total", list(numbers))
        return lambda: [sum(column) for column in zip(*receive(), strict=True)]

    def failed(self, step: int, error: str) -> None:
        """Act alone from here on."""
        self._is_alone = True
        self._board.end(self.rank)

    def _reduce(self, numbers: torch.Tensor, operation: str) -> torch.Tensor:
        of_ranks = torch.stack(self.gather(numbers)) if len(numbers) else numbers[None]
        return of_ranks.amax(0) if operation == "MAX" else of_ranks.sum(0)

    def _pass(self, kind: str, value: Any) -> Callable[[], list[Any]]:
        if self._is_alone:
            return lambda: [value]
        self._calls += 1
        call = self._calls
        self._board.put(call, self.rank, kind, value)
        return lambda: self._board.take(call)


def run_on_threads(function: Callable[[ThreadRanks], Any], world_size: int) -> list[Any]:
    """Call a function on every rank, each in its thread, and return the results by rank; the first error is raised."""
    board, results, errors = Board(world_size), [None] * world_size, list[BaseException]()

    def run(rank: int) -> None:
        with board.turn:
            try:
                results[rank] = function(ThreadRanks(rank, board))
            except BaseException as error:
                errors.append(error)
            board.end(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
