"""The processes of a run: which one this is, and what all of them do together.

A run on several processes needs four things from the others: rank 0 does something for all, a flag of one becomes a
decision of all, requests are agreed on without waiting, and numbers are added up for the record. `OneProcess` does each
of these alone, so that no other code asks how many processes there are.

Everything goes through host tensors and one gloo group that nothing else uses: training's own collectives, on whatever
backend, are not waited for and not mixed up with these.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from hookline.errors import RankError, error_text

Result = TypeVar("Result")

FINGERPRINT_BITS = 24  # its square, summed over 16,384 ranks, fits into an int64


class OneProcess:
    """A run in one process; also the base of `ProcessRanks`, which several processes share.

    Every method but `first` and `failed` must be called by all ranks in the same order.
    """

    rank = 0
    world_size = 1
    local_rank = 0
    group: Any = None
    """The process group for collectives of hooks; None in one process."""
    agrees_later = False
    """Whether `agree` returns the sums of the previous call."""

    def first(self, make: Callable[[], Result]) -> Result:
        """Let rank 0 call a function, and return its result on every rank; it must be a JSON value.

        Raises:
            RankError: On the other ranks, if the function raises; on rank 0 the exception itself is raised.
        """
        return make()

    def gather(self, value: Any) -> list[Any]:
        """Return the JSON values that the ranks pass, by rank. For rare use: what it returns grows with the ranks."""
        return [value]

    def decide(self, flag: bool) -> bool:
        """Return whether any rank passes True. Waits for all ranks."""
        return self.total([flag])[0] > 0

    def total(self, numbers: Sequence[int]) -> list[int]:
        """Add up integers over the ranks. Waits for all ranks."""
        return list(numbers)

    def agree(self, numbers: Sequence[int]) -> list[int]:
        """Add up integers over the ranks without waiting for them.

        Returns:
            The sums; with several ranks those of the previous call, zeros at the first one.
        """
        return list(numbers)

    def settle(self, numbers: Sequence[int]) -> list[int]:
        """Do the same and wait; what is left of the previous call is added to the sums."""
        return list(numbers)

    def exchange(self, maxima: Tensor, sums: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Take maxima, then sums, over the ranks: two collectives, which wait.

        Args:
            maxima: Numbers on the host, float64.
            sums: Returns the numbers to add up, float64 on the host, given the maxima over all ranks.

        Returns:
            The maxima and the sums over all ranks.
        """
        return maxima, sums(maxima)

    def failed(self, what: Mapping[str, Any]) -> None:
        """Report to the other ranks why this one ends. From then on it acts alone: every call is that of one process."""

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


class ProcessRanks(OneProcess):
    """The ranks of the default process group. Every rank makes one at the same time.

    Args:
        rank: This process's rank.
        world_size: The number of ranks.
    """

    agrees_later = True

    def __init__(self, rank: int, world_size: int) -> None:
        from torch import distributed

        self.rank, self.world_size = rank, world_size
        self.local_rank = int(os.environ.get("LOCAL_RANK", rank))
        self._distributed = distributed
        self.group = distributed.new_group(backend="gloo")
        self._sent: tuple[Tensor, Any] | None = None  # what `agree` sent last, and the request that adds it up
        self._alone = False

    def first(self, make: Callable[[], Result]) -> Result:
        """Let rank 0 call a function, and return its result on every rank."""
        if self._alone:
            return make()
        answer: Any = None
        failure: BaseException | None = None
        if self.rank == 0:
            try:
                answer = {"result": make()}
            except BaseException as error:
                failure, answer = error, {"error": error_text(error)}
        answer = self._broadcast(answer)
        if failure is not None:
            raise failure
        if "error" in answer:
            raise RankError(f"rank 0: {answer['error']}")
        result: Result = answer["result"]
        return result

    def gather(self, value: Any) -> list[Any]:
        """Return the JSON values that the ranks pass, by rank."""
        if self._alone:
            return [value]
        own = _as_bytes(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        self._distributed.all_gather(sizes, torch.tensor([len(own)]), group=self.group)
        longest = max(int(size) for size in sizes)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        padded = torch.nn.functional.pad(own, (0, longest - len(own)))
        self._distributed.all_gather(parts, padded, group=self.group)
        return [json.loads(bytes(part[: int(size)].tolist())) for part, size in zip(parts, sizes, strict=True)]

    def total(self, numbers: Sequence[int]) -> list[int]:
        """Add up integers over the ranks."""
        totals: list[int] = self._sum(torch.tensor(numbers, dtype=torch.int64)).tolist()
        return totals

    def agree(self, numbers: Sequence[int]) -> list[int]:
        """Return the sums of what was sent at the previous call, and send the numbers."""
        if self._alone:
            return list(numbers)
        before = self._received(len(numbers))
        sent = torch.tensor(numbers)
        self._sent = sent, self._distributed.all_reduce(sent, group=self.group, async_op=True)
        return before

    def settle(self, numbers: Sequence[int]) -> list[int]:
        """Return the sums of the previous call and of this one together."""
        if self._alone:
            return list(numbers)
        before = self._received(len(numbers))
        return [one + other for one, other in zip(before, self.total(numbers), strict=True)]

    def exchange(self, maxima: Tensor, sums: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Take maxima, then sums, over the ranks."""
        if not self._alone and len(maxima):
            maxima = maxima.clone()
            self._distributed.all_reduce(maxima, self._distributed.ReduceOp.MAX, group=self.group)
        own = sums(maxima)
        return maxima, self._sum(own.clone()) if len(own) else own

    def failed(self, what: Mapping[str, Any]) -> None:
        """Act alone from now on."""
        self._alone = True

    def _sum(self, numbers: Tensor) -> Tensor:
        if not self._alone:
            self._distributed.all_reduce(numbers, group=self.group)
        return numbers

    def _received(self, count: int) -> list[int]:
        if self._sent is None:
            return [0] * count
        (numbers, request), self._sent = self._sent, None
        request.wait()
        received: list[int] = numbers.tolist()
        return received

    def _broadcast(self, value: Any) -> Any:
        own = _as_bytes(value) if self.rank == 0 else torch.zeros(0, dtype=torch.uint8)
        size = torch.tensor([len(own)])
        self._distributed.broadcast(size, 0, group=self.group)
        sent = own if self.rank == 0 else torch.zeros(int(size), dtype=torch.uint8)
        self._distributed.broadcast(sent, 0, group=self.group)
        return json.loads(bytes(sent.tolist()))


_found: dict[int, tuple[Any, ProcessRanks]] = {}  # of the default process group, which a process may make again


def find_ranks() -> OneProcess:
    """Return the ranks of the default process group, or of this process alone if there is none.

    With several ranks the first call makes a process group, so all ranks must call this at the same point.
    """
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return OneProcess()
    world = distributed.group.WORLD
    if id(world) not in _found:
        _found.clear()
        _found[id(world)] = world, ProcessRanks(distributed.get_rank(), distributed.get_world_size())
    return _found[id(world)][1]


def own_rank() -> OneProcess:
    """Return which rank this process is, for hooks in a user's own loop; it does everything else alone.

    No process group is made, so that not all ranks need to call this.
    """
    ranks, distributed = OneProcess(), torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        ranks.rank, ranks.world_size = distributed.get_rank(), distributed.get_world_size()
        ranks.local_rank = int(os.environ.get("LOCAL_RANK", ranks.rank))
    return ranks


def fingerprint(parts: Iterable[Any]) -> int:
    """Return a small number that differs between ranks if some text of theirs does."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "backslashreplace")).digest()
    return int.from_bytes(digest[: FINGERPRINT_BITS // 8], "big")


def all_equal(total: int, total_of_squares: int, world_size: int) -> bool:
    """Return whether all ranks have added the same number, given the sums of the numbers and of their squares."""
    return total_of_squares * world_size == total * total


def add_up(
    ranks: OneProcess, named: Mapping[str, Sequence[float]], width: int, names_agree: bool | None = None
) -> dict[str, list[float]]:
    """Add up numbers by name over the ranks; a name that only some ranks have arrives as well. Waits for all ranks.

    Args:
        ranks: The ranks.
        named: The numbers of each name.
        width: How many numbers each name has.
        names_agree: Whether all ranks have the same names in the same order, if that is known already.

    Returns:
        The sums by name; the names of rank 0 first.
    """
    names = list(named)
    if names_agree is None:
        mark = fingerprint(names)
        names_agree = all_equal(*ranks.total([mark, mark * mark]), ranks.world_size)
    if not names_agree:
        names = list(dict.fromkeys(name for of_rank in ranks.gather(names) for name in of_rank))
    none = [0.0] * width
    own = torch.tensor([named.get(name, none) for name in names], dtype=torch.float64).reshape(-1)
    _, sums = ranks.exchange(own[:0], lambda _: own)
    return dict(zip(names, sums.reshape(len(names), width).tolist(), strict=True))


def compare(ranks: OneProcess, sections: Mapping[str, Any]) -> None:
    """Check that something is the same on all ranks.

    Args:
        ranks: The ranks.
        sections: What is compared, by what it is called: JSON values.

    Raises:
        RankError: On every rank, with the first difference of each section, by rank.
    """
    texts = {name: json.dumps(value, sort_keys=True, default=str) for name, value in sections.items()}
    marks = ranks.gather([fingerprint([text]) for text in texts.values()])
    differing = [name for index, name in enumerate(texts) if len({one[index] for one in marks}) > 1]
    if differing:
        found = ranks.gather({name: sections[name] for name in differing})
        raise RankError("; ".join(_difference(name, [one[name] for one in found]) for name in differing))


def _difference(name: str, values: Sequence[Any]) -> str:
    """Say how the ranks differ, at the first place where two of them do."""
    path, here = name, list(values)
    while all(isinstance(one, dict) for one in here):
        keys = dict.fromkeys(key for one in here for key in one)
        key = next(key for key in keys if len({json.dumps(one.get(key), default=str) for one in here}) > 1)
        path, here = f"{path}.{key}", [one.get(key) for one in here]
    by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(here):
        by_value.setdefault(json.dumps(value, default=str), []).append(rank)
    said = (f"{text} on rank{'s' if len(on) > 1 else ''} {_listed(on)}" for text, on in by_value.items())
    return f"the ranks differ in {path}: {', '.join(said)}"


def _listed(ranks: Sequence[int], most: int = 8) -> str:
    """Write rank numbers, the first ones if they are many."""
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return ", ".join(map(str, ranks[:most])) + more


def leave_ranks() -> None:
    """Destroy the process groups, because a thread of theirs that runs when the interpreter ends may abort the process.

    Call it for process groups that Hookline has initialized. After a failure it does nothing: it would wait for ranks
    that may be gone.
    """
    if _found and torch.distributed.is_initialized() and not any(ranks._alone for _, ranks in _found.values()):
        torch.distributed.destroy_process_group()


def host() -> str:
    """Return the name of the machine that this process runs on."""
    return platform.node()


def _as_bytes(value: Any) -> Tensor:
    return torch.tensor(list(json.dumps(value).encode("ascii")), dtype=torch.uint8)
