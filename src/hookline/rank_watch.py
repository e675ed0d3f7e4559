"""Watch the other processes of a run from a side thread: when one fails, all of them end and know which one failed.

The main thread of a rank that waits for a failed one is blocked in a collective, where it handles neither exceptions
nor signals. So every rank has a side thread and a connection to a store that rank 0 hosts. The thread writes a
heartbeat, looks for a failure that a rank has reported, and watches one other rank, the one before it; what each rank
costs does not depend on how many there are.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic, sleep
from types import FrameType
from typing import Any, TypeVar

from hookline._console import logger
from hookline._fs import describe_process, is_process_alive
from hookline.errors import RankError

Result = TypeVar("Result")

BEAT_SECONDS = 1.0
MOST_BEATS = 2000  # per second, for all ranks together: one thread of rank 0 answers them
SILENT_BEATS = 3  # after this long without one, check whether a process of this machine exists
SILENT_BEATS_ELSEWHERE = 30  # the existence of another machine's process cannot be checked
BLAME_SECONDS = 5.0  # in which another rank may report why the connection to a third one was lost
GRACE_SECONDS = 3.0  # in which the main thread may end the run itself, once a failure is known
CLOSE_SECONDS = 2.0  # for each of the last calls of a process that is ended
ANSWER_SECONDS = 20.0  # for an answer of rank 0's store when this rank ends the run
FAILED, KNOWN = "failed", "known"  # keys: the first failure, and how many ranks know it
# Modules in which a thread waits for other ranks.
_COLLECTIVES = ("torch.distributed", "torch.nn.parallel.distributed", "hookline.ranks")


@dataclass(frozen=True)
class WatchedRun:
    """The functions of a run that the watch needs; all are called in the watch's thread.

    Args:
        position: Returns how far the run is, as numbers that grow with every training and validation batch; the first
            one is the step.
        hook_in: Returns the hook and the event that a thread is in, given the thread's id; None if it is in none.
        last_calls: Called one after another with the error, if the main thread is blocked and the process is ended.
    """

    position: Callable[[], Sequence[int]]
    hook_in: Callable[[int], tuple[str, str] | None]
    last_calls: Sequence[Callable[[RankError], object]]


def as_error(failure: Mapping[str, Any]) -> RankError:
    """Return a reported failure as the error that ends the other ranks."""
    return RankError(f"rank {failure['rank']} failed at step {failure['step']}: {failure['error']}")


def call_within(seconds: float, call: Callable[[], Result]) -> Result:
    """Call a function that waits for another process in a side thread, and return its result.

    torch's calls to a frozen process never return, whatever their timeout.

    Raises:
        TimeoutError: If it takes longer; the thread keeps waiting.
        Exception: The function's exception.
    """
    results: list[Result] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="hookline-ranks-call", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"its process has not answered for {seconds:g} s")
    return results[0]


class RankWatch:
    """The thread of one rank during one run.

    Args:
        rank: This process's rank.
        world_size: The number of ranks.
        store: A store that all ranks share, with keys of this run alone.
        run: The run.
        timeout: Seconds without a batch after which a rank counts as hanging.
    """

    def __init__(self, rank: int, world_size: int, store: Any, run: WatchedRun, timeout: float) -> None:
        self.failure: dict[str, Any] | None = None
        """The first failure of the run that this rank knows of, including its own."""
        self._rank, self._world_size, self._store, self._run, self._timeout = rank, world_size, store, run, timeout
        self._interval = max(BEAT_SECONDS, world_size / MOST_BEATS)
        self._main = threading.get_ident()
        self._wake, self._over = threading.Event(), False
        self._wake.set()  # the first look comes at once
        self._suspects = False  # whether the main thread has lost the connection to a rank
        self._ending = False  # whether the main thread ends the run
        self._closing = threading.Lock()  # held by the thread that ends the run
        self._beats = 0
        self._heard, self._heard_at = -1, monotonic()  # the newest heartbeat of the rank that is watched
        self._seen_position: Any = None
        self._position: Sequence[int] | None = None  # The position of this rank at its last beat.
        self._moved_at = monotonic()
        # When the rank that is watched was first seen to be late, and the beats of all ranks then.
        self._late: tuple[float, dict[int, Any]] | None = None
        store.set(f"process/{rank}", json.dumps(describe_process()))
        self._thread = threading.Thread(target=self._watch, name="hookline-ranks", daemon=True)
        self._thread.start()

    # ---- called by the main thread -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise RankError if another rank has failed."""
        if self.failure is not None and self.failure["rank"] != self._rank:
            raise as_error(self.failure)

    def report(self, step: int, error: str) -> None:
        """Report that this rank ends the run; the first report of all ranks counts.

        If the thread is already ending this process, this does not return to the main thread.
        """
        if self._ending or threading.get_ident() != self._main:
            return
        if not self._closing.acquire(blocking=False):
            sleep(10 * CLOSE_SECONDS)  # the process ends before
        self._ending = True
        self._closing.release()
        if self.failure is None:
            self._report({"rank": self._rank, "step": step, "error": error})

    def blamed(self) -> RankError | None:
        """Return another rank's failure after the connection to some rank was lost; waits until it can be known."""
        self._suspects = True
        deadline = monotonic() + max(BLAME_SECONDS, (SILENT_BEATS + 2) * self._interval)
        while self.failure is None and monotonic() < deadline and self._thread.is_alive():
            self._wake.set()
            sleep(0.05)
        if self.failure is None or self.failure["rank"] == self._rank:
            return None
        return as_error(self.failure)

    def stop(self) -> None:
        """End the thread: the run is over for this rank. Rank 0 waits until all ranks know about a failure."""
        self._over = True
        self._wake.set()
        self._thread.join(ANSWER_SECONDS)
        deadline = monotonic() + 2 * self._interval
        while self._rank == 0 and self.failure is not None and monotonic() < deadline:
            if self._store.add(KNOWN, 0) >= self._world_size - 1:
                return
            sleep(0.02)

    # ---- in the thread -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Beat and watch the others until the run is over or a failure is known, then make sure that the run ends."""
        while not self._over and self.failure is None:
            self._wake.wait(self._interval)
            self._wake.clear()
            if self._over:
                return
            try:
                call_within(self._timeout, partial(self._beat_and_look, self._where()))
            except Exception as error:  # torch has no common class for a lost connection
                if self._rank == 0:
                    logger.warning("the ranks are no longer watched: %s", error)
                    return
                why = f"{error} (rank_timeout)" if isinstance(error, TimeoutError) else "its process is gone"
                self._know({"rank": 0, "step": self._run.position()[0], "error": why})
        self._see_that_it_ends()

    def _where(self) -> dict[str, Any]:
        """Say where the main thread is, for the report of a hang."""
        position, before = list(self._run.position()), self._position
        frame, self._position = sys._current_frames().get(self._main), position
        hook = self._run.hook_in(self._main) if position == before else None  # only if it may hang in it
        return {"position": position, "hook": hook, "place": _place(frame), "waits": _waits(frame)}

    def _beat_and_look(self, where: Mapping[str, Any]) -> None:
        """Find out whether a rank has reported a failure, or the rank that is watched is gone or hangs.

        Args:
            where: Where the main thread of this rank is, which the others read.
        """
        self._beats += 1
        self._store.set(f"beat/{self._rank}", json.dumps({"beat": self._beats, **where}))
        if self._store.check([FAILED]):
            self._know(json.loads(self._store.get(FAILED)))
            return
        watched = (self._rank - 1) % self._world_size
        now = monotonic()
        if not self._store.check([f"beat/{watched}", f"process/{watched}"]):
            if now - self._moved_at > self._timeout:
                error = f"it has not started within {self._timeout:g} s (rank_timeout)"
                self._report({"rank": watched, "step": self._run.position()[0], "error": error})
            return
        beat = json.loads(self._store.get(f"beat/{watched}"))
        if beat["beat"] != self._heard:
            self._heard, self._heard_at = beat["beat"], now
        if beat["position"] != self._seen_position:
            self._seen_position, self._moved_at, self._late = beat["position"], now, None
        process, silent = json.loads(self._store.get(f"process/{watched}")), (now - self._heard_at) / self._interval
        is_here = process["host"] == describe_process()["host"]
        if not is_here and silent > SILENT_BEATS_ELSEWHERE:
            error = f"its process or its machine ({process['host']}) is gone"
        elif is_here and (silent > SILENT_BEATS or self._suspects) and not is_process_alive(process):
            error = f"its process ({process['pid']}) is gone{_in_hook(beat, 'last seen in')}"
        elif now - self._moved_at > self._timeout:
            since, beats = self._late = self._late or (now, self._read_beats())
            if now - since > SILENT_BEATS * self._interval:
                self._report(self._hanging(beats))
            return
        else:
            return
        # The heartbeat is older than the fault; ranks are at most a step apart.
        self._report({"rank": watched, "step": self._run.position()[0], "error": error})

    def _read_beats(self) -> dict[int, Any]:
        return {rank: json.loads(self._store.get(f"beat/{rank}")) for rank in range(self._world_size)}

    def _hanging(self, earlier: Mapping[int, Any]) -> dict[str, Any]:
        """Return the failure of the rank that the others wait for, given their beats of some time ago.

        That is one that does not beat, because it is frozen. Otherwise it is the one that is in a hook and is not
        itself waiting, or else the one that is furthest behind.
        """
        beats = self._read_beats()

        def place_in_order(rank: int) -> Any:
            beat = beats[rank]
            return beat["beat"] != earlier[rank]["beat"], beat["waits"], not beat["hook"], beat["position"]

        order = sorted(beats, key=place_in_order)
        first = beats[order[0]]
        error = f"no batch for {self._timeout:g} s (rank_timeout){_in_hook(first)}; it is at {first['place']}"
        return {"rank": order[0], "step": first["position"][0], "error": error}

    def _report(self, failure: dict[str, Any]) -> None:
        """Write a failure for all ranks, and read the one that was written first."""
        try:
            text = json.dumps(failure)
            first = call_within(ANSWER_SECONDS, lambda: self._store.compare_set(FAILED, "", text))
            self._know(json.loads(first))
        except Exception:  # rank 0 is gone or frozen, so the others know that
            self._know(failure)

    def _know(self, failure: dict[str, Any]) -> None:
        if self.failure is not None:
            return
        self.failure = failure
        if failure["rank"] != self._rank:
            try:
                call_within(CLOSE_SECONDS, lambda: self._store.add(KNOWN, 1))
            except Exception:  # rank 0 is gone or frozen
                return

    def _see_that_it_ends(self) -> None:
        """End the process if the main thread does not end the run, or waits for other ranks while it does."""
        place, since = None, monotonic()
        while not self._over:
            is_ending, frame = self._ending, sys._current_frames().get(self._main)
            here = None if frame is None else (id(frame), frame.f_lasti)
            if is_ending and (here != place or not _waits(frame)):
                place, since = here, monotonic()
            late = monotonic() - since > GRACE_SECONDS
            if late and self._closing.acquire(blocking=False):
                if self._ending == is_ending:
                    self._end_process()
                self._closing.release()
            self._wake.wait(0.05)
            self._wake.clear()

    def _end_process(self) -> None:
        """Close the record and end the process: the main thread may never return from a collective."""
        assert self.failure is not None
        error = as_error(self.failure)
        logger.warning("ended, because %s", error, of_rank=True)
        for call in self._run.last_calls:
            thread = threading.Thread(target=call, args=(error,), daemon=True)
            thread.start()
            thread.join(CLOSE_SECONDS)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(1)


def _in_hook(beat: Mapping[str, Any], verb: str = "in") -> str:
    return f", {verb} hook {beat['hook'][0]!r}, {beat['hook'][1]}" if beat["hook"] else ""


def _place(frame: FrameType | None) -> str:
    """Say where a thread is in the user's code, or otherwise where it is."""
    here = frame
    while here is not None and here.f_globals.get("__name__", "").partition(".")[0] in ("torch", "hookline"):
        here = here.f_back
    if (here := here or frame) is None:
        return ""
    return f"{here.f_code.co_filename}:{here.f_lineno} in {here.f_code.co_name}"


def _waits(frame: FrameType | None) -> bool:
    """Return whether a thread waits for other ranks: in a collective, or in a backward pass, which may run one."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_COLLECTIVES) or frame.f_code.co_name == "_engine_run_backward":
            return True
        if not module.startswith("torch."):
            return False
        frame = frame.f_back
    return False
