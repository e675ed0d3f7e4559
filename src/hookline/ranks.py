"""The processes of a run: which one this is, and what all of them do together.

A number crosses ranks in one of three ways. `total` adds up a few numbers and waits for all ranks. `add_up` does so for
numbers with names, which may differ between ranks. The record combines what was logged or shared in its next exchange,
without waiting.

Everything goes through host tensors and one gloo group that nothing else uses: these neither wait for training's own
collectives, on any backend, nor interfere with them.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property, partial
from itertools import chain
from secrets import token_hex
from time import monotonic
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from hookline.errors import RankError, error_text
from hookline.rank_watch import ANSWER_SECONDS, RankWatch, WatchedRun, call_within

Result = TypeVar("Result")
Name = TypeVar("Name", bound=Hashable)
Number = TypeVar("Number", int, float)

CONNECT_SECONDS = 60.0  # the minimum, for ranks to find each other
# Words in the errors of backends whose peer process is gone.
LOST_CONNECTION = ("connection closed", "connection reset", "connection refused", "broken pipe", "gloo", "nccl")
LONGEST_VALUE = 200  # characters of a value in a message
FINGERPRINT_BITS = 24  # its square, summed over 16,384 ranks, fits into an int64


class Ranks:
    """This process of a run, and the operations that all processes perform together.

    Without a process group it acts alone. Every method but `check`, `failed` and `explain` must be called by all ranks
    in the same order.

    Args:
        rank: This process's rank.
        world_size: The number of ranks.
        local_rank: This process's rank on its machine.
        own_group: The process group through which all ranks act together; None if this one acts alone.
    """

    act_together = False
    """Whether there are other ranks that do all of this together; not in a user's own loop, where each acts alone."""

    def __init__(self, rank: int = 0, world_size: int = 1, local_rank: int = 0, own_group: Any = None) -> None:
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        if own_group is not None:
            self.act_together = True
        self._group = own_group  # None after a failure, too: from then on this rank acts alone
        self._has_failed = False
        self._store: Any = None  # through which the watches of the runs of this process report failures
        self._watch: RankWatch | None = None
        self._runs = 0

    @cached_property
    def group(self) -> Any:
        """The process group for collectives of hooks that declare them, which nothing else uses; None in one process.

        All ranks make it at its first use.
        """
        return None if self._group is None else torch.distributed.new_group(backend="gloo")

    def first(self, make: Callable[[], Result]) -> Result:
        """Let rank 0 call a function, and return its result, of plain values, on every rank.

        Raises:
            RankError: On the other ranks, if the function raises; on rank 0 the exception itself is raised.
        """
        if self._group is None:
            return make()
        self.check()
        sent: list[Any] = [None, None]  # the result, and what was raised
        failure: BaseException | None = None
        if self.rank == 0:
            try:
                sent[0] = make()
            except BaseException as error:
                failure, sent[1] = error, error_text(error)
        torch.distributed.broadcast_object_list(sent, 0, group=self._group)
        if failure is not None:
            raise failure
        result: Result = sent[0]
        if sent[1] is not None:
            raise RankError(f"rank 0: {sent[1]}")
        return result

    def gather(self, value: Any) -> list[Any]:
        """Return the plain values that the ranks pass, by rank. For rare use: its result grows with their number."""
        if self._group is None:
            return [value]
        self.check()
        values = [None] * self.world_size
        torch.distributed.all_gather_object(values, value, group=self._group)
        return values

    def decide(self, flag: bool) -> bool:
        """Return whether any rank passes True. Waits for all ranks."""
        return self.total([flag])[0] > 0

    def total(self, numbers: Sequence[Number]) -> list[Number]:
        """Add up numbers over the ranks, all of them integers or all of them floats. Waits for all ranks."""
        return self.send(numbers)()

    def all_equal(self, number: int) -> bool:
        """Return whether all ranks pass the same number, such as a fingerprint. Waits for all ranks."""
        return self.are_equal(*self.total([number, number * number]))

    def are_equal(self, total: int, total_of_squares: int) -> bool:
        """Return whether all ranks have added the same number, given the sums of the numbers and of their squares."""
        return total_of_squares * self.world_size == total * total

    def add_up(self, named: Mapping[Name, Sequence[float] | Tensor]) -> dict[Name, Tensor]:
        """Add up numbers by name over the ranks. Waits for all ranks.

        Args:
            named: The numbers of each name. A rank may lack some, and adds nothing to their sums.

        Returns:
            The sums of every name that some rank has, float64 on the host; the names of rank 0 first.
        """
        tensors = {name: torch.as_tensor(numbers, dtype=torch.float64, device="cpu") for name, numbers in named.items()}
        sizes = {name: len(numbers) for name, numbers in tensors.items()}
        if not self.all_equal(fingerprint(sizes.items())):
            gathered, sizes = self.gather(list(sizes.items())), {}
            for name, size in chain.from_iterable(gathered):
                sizes[name] = max(size, sizes.get(name, 0))
        none = torch.zeros(0, dtype=torch.float64, device="cpu")
        padded = [pad(numbers := tensors.get(name, none), (0, size - len(numbers))) for name, size in sizes.items()]
        _, sums = self.exchange(none, lambda _: torch.cat([none, *padded]))
        return dict(zip(sizes, torch.split(sums, list(sizes.values())), strict=True))

    def send(self, numbers: Sequence[Number]) -> Callable[[], list[Number]]:
        """Begin to add up numbers, as `total` does; return a function that waits for the sums and returns them."""
        if self._group is None:
            return lambda: list(numbers)
        self.check()
        sums = torch.tensor(numbers, dtype=torch.float64 if isinstance(numbers[0], float) else torch.int64)
        request = torch.distributed.all_reduce(sums, group=self._group, async_op=True)

        def receive() -> list[Number]:
            if self._group is not None:
                self.check()
                request.wait()
            received: list[Number] = sums.tolist()
            return received

        return receive

    def exchange(self, maxima: Tensor, sums: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Take maxima, then sums, over the ranks: two collectives, which wait.

        Args:
            maxima: Numbers on the host, float64.
            sums: Returns the numbers to add up, float64 on the host, given the maxima over all ranks.

        Returns:
            The maxima and the sums over all ranks.
        """
        maxima = self._reduce(maxima, "MAX")
        return maxima, self._reduce(sums(maxima), "SUM")

    def _reduce(self, numbers: Tensor, operation: str) -> Tensor:
        if self._group is None or not len(numbers):
            return numbers
        self.check()
        reduced = numbers.clone()
        torch.distributed.all_reduce(reduced, getattr(torch.distributed.ReduceOp, operation), group=self._group)
        return reduced

    @contextmanager
    def watch(self, run: WatchedRun, timeout: float) -> Iterator[None]:
        """Watch the other ranks during a run, from a side thread, and report exceptions in the block to them.

        Args:
            run: The facts that the watch needs from the run.
            timeout: Seconds without a batch after which a rank counts as hanging.
        """
        if self._has_failed:
            raise RankError(
                "a rank failed in an earlier run of these processes, so they are no longer in step: start them again"
            )
        if self._group is None:
            yield
            return
        self._begin_together(timeout)
        self._runs += 1
        store = torch.distributed.PrefixStore(f"run {self._runs}", self._store)  # type: ignore[attr-defined]
        watch = self._watch = RankWatch(self.rank, self.world_size, store, run, timeout)
        try:
            yield
        except BaseException as error:
            self.failed(run.position()[0], error_text(error))
            raise
        finally:
            watch.stop()
            self._watch = None

    def _begin_together(self, timeout: float) -> None:
        """Wait until all ranks begin the run, and connect to rank 0's store in the first one.

        No watch would notice a rank that freezes before it begins.

        Raises:
            RankError: If a rank does not begin within the timeout.
        """
        seconds, began = max(timeout, CONNECT_SECONDS), monotonic()
        # torch sets no timeout for other collectives, and one that keeps waiting would keep this process from ending.
        barrier = partial(torch.distributed.monitored_barrier, self._group, timedelta(seconds=seconds))
        try:
            call_within(2 * seconds, barrier)  # in a thread, so that signals are handled
            self._store = self._store or call_within(2 * seconds, self._connect)
        except Exception as error:
            if isinstance(error, RankError) or monotonic() - began < seconds:  # a rank is gone
                raise
            self._group, self._has_failed = None, True
            what = f"rank {self.rank} has waited {seconds:g} s for the other ranks to begin the run"
            raise RankError(f"{what}; raise rank_timeout if one of them has more to prepare") from error

    def _connect(self) -> Any:
        """Return a store that rank 0 hosts, in addition to torch's own, which belongs to the process group.

        If all ranks are on one machine, it listens only to that machine. Otherwise every key begins with a random
        string that only the ranks know, because a stranger's message could end the run.
        """
        hosts = self.gather(host())
        is_local = len(set(hosts)) == 1
        address = "127.0.0.1" if is_local else os.environ.get("MASTER_ADDR") or hosts[0]
        stores: list[Any] = []

        def open_store(port: int) -> int:
            make_store, listener = torch.distributed.TCPStore, None  # type: ignore[attr-defined]
            if is_local and self.rank == 0:  # the store itself would listen to all networks
                with socket.create_server((address, 0)) as server:
                    port, listener = server.getsockname()[1], server.detach()
            waits = timedelta(seconds=CONNECT_SECONDS)
            stores.append(make_store(address, port, None, self.rank == 0, waits, False, master_listen_fd=listener))
            return int(stores[0].port)

        port, secret, problem = self.first(partial(open_store, 0)), self.first(token_hex), None
        try:
            if not stores:
                open_store(port)
        except Exception as error:
            problem = f"rank {self.rank} cannot reach rank 0 at {address}, port {port}: {error_text(error)}"
        if problems := list(filter(None, self.gather(problem))):
            raise RankError(problems[0])
        stores[0].set_timeout(timedelta(seconds=ANSWER_SECONDS))
        return torch.distributed.PrefixStore(secret, stores[0])  # type: ignore[attr-defined]

    def check(self) -> None:
        """Raise RankError if the watch has found out that another rank failed."""
        if self._watch is not None:
            self._watch.check()

    def failed(self, step: int, error: str) -> None:
        """Report to the other ranks why this one ends. From then on it acts alone, like a single process.

        Args:
            step: The step at which it failed.
            error: The error, with the hook and the event in which it happened, if any.
        """
        if self._group is not None:
            self._group, self._has_failed = None, True
        if self._watch is not None:
            self._watch.report(step, error)

    def explain(self, error: BaseException) -> BaseException:
        """Return why a run fails: another rank's failure, if `error` only says that the connection to it was lost."""
        text = str(error).lower() if isinstance(error, RuntimeError) else ""
        if self._watch is None or not any(words in text for words in LOST_CONNECTION):
            return error
        return self._watch.blamed() or error

    def meet(self) -> None:
        """Wait until all ranks are at the end of the run."""
        if self._group is not None:
            self.total([0])

    def stop_watching(self) -> None:
        """End the watch: from now on the run waits for no other rank, and the others may end their processes."""
        if self._watch is not None:
            self._watch.stop()

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


_default_ranks: tuple[Any, Ranks] | None = None  # A process may create its default process group again.


def find_ranks(timeout: float = 600.0) -> Ranks:
    """Return the ranks of the default process group, or of this process alone if there is none.

    With several ranks, the first call creates a process group, so all ranks must call this at the same point.

    Args:
        timeout: Seconds in which all ranks must have come to the first call.

    Raises:
        RankError: If some have not.
    """
    global _default_ranks
    rank, world_size = rank_and_world_size()
    if world_size == 1:
        return Ranks()
    world = torch.distributed.group.WORLD
    if _default_ranks is None or _default_ranks[0] is not world:
        seconds = max(timeout, CONNECT_SECONDS)
        try:
            # torch's own limit also applies to every later call, and counts twice.
            group = call_within(seconds, lambda: torch.distributed.new_group(backend="gloo"))
        except TimeoutError:
            what = f"rank {rank} has waited {seconds:g} s for the other ranks to make a trainer"
            raise RankError(f"{what}; raise rank_timeout if one of them has more to prepare") from None
        _default_ranks = world, own_rank(group)
    return _default_ranks[1]


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, 0 and 1 without a process group; a rank may ask alone."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def leave_ranks() -> None:
    """Destroy the process groups, because one of their threads may abort the process when the interpreter exits.

    Call it for process groups that Hookline has initialized. After a failure it does nothing: it would wait for ranks
    that may be gone.
    """
    if torch.distributed.is_initialized() and not (_default_ranks is not None and _default_ranks[1]._has_failed):
        torch.distributed.destroy_process_group()


def own_rank(group: Any = None) -> Ranks:
    """Return this process's rank; without a group, as in a user's own loop, it does everything else alone.

    No process group is created, so that not all ranks need to call this.
    """
    rank, world_size = rank_and_world_size()
    return Ranks(rank, world_size, int(os.environ.get("LOCAL_RANK", rank)), group)


def fingerprint(parts: Iterable[Any]) -> int:
    """Return a small number that differs between ranks if a string does."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "backslashreplace")).digest()
    return int.from_bytes(digest[: FINGERPRINT_BITS // 8], "big")


def compare(ranks: Ranks, sections: Mapping[str, Any], remedy: str = "") -> None:
    """Check that something is the same on all ranks.

    Args:
        ranks: The ranks.
        sections: The JSON values to compare, by the name that errors use.
        remedy: The remedy that the error states.

    Raises:
        RankError: On every rank, with the first difference of each section, by rank.
    """
    texts = {name: json.dumps(value, sort_keys=True, default=str) for name, value in sections.items()}
    marks = ranks.gather([fingerprint([text]) for text in texts.values()])
    differing = [name for index, name in enumerate(texts) if len({of_rank[index] for of_rank in marks}) > 1]
    if differing:
        gathered = ranks.gather({name: texts[name] for name in differing})
        said = [_difference(name, [json.loads(of_rank[name]) for of_rank in gathered]) for name in differing]
        raise RankError("; ".join(filter(None, [*said, remedy])))


def _difference(name: str, values: Sequence[Any], place: tuple[str, ...] = ()) -> str:
    """Say how the ranks differ, at the first place where two of them do, given the values there by rank."""
    if all(isinstance(value, list) for value in values) and len(set(map(len, values))) == 1:
        values = [dict(enumerate(value)) for value in values]
    if all(isinstance(value, dict) for value in values):
        keys = dict.fromkeys(chain.from_iterable(values))
        for key in keys:
            if lacking := [rank for rank, value in enumerate(values) if key not in value]:
                having = [rank for rank in range(len(values)) if rank not in lacking]
                path = ".".join([*place, str(key)])
                return f"the ranks differ in {name}: {path!r} is on {on_ranks(having)}, not on {on_ranks(lacking)}"
        key = next(key for key in keys if len({json.dumps(value[key]) for value in values}) > 1)
        return _difference(name, [value[key] for value in values], (*place, str(key)))
    by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(json.dumps(value), []).append(rank)
    cut = ((text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…", on) for text, on in by_value.items())
    said = (f"{text} on {on_ranks(on)}" for text, on in cut)
    return f"the ranks differ in {name}: {'.'.join(place)}{' is ' if place else ''}{', '.join(said)}"


def on_ranks(ranks: Sequence[int], most: int = 8) -> str:
    """Write rank numbers, only the first if there are many."""
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:most]))}{more}"


def host() -> str:
    """Return the name of the machine that this process runs on."""
    return platform.node()
