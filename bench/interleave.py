"""Time single steps of many contenders alternately, so that disturbances of the machine affect all of them.

A machine's speed drifts by more than the differences to measure, so whole runs cannot be compared. Instead, every
contender makes a few steps in each round, of which the last is timed. Its result is the median over the rounds of its
difference to the baseline in the same round.
"""

import gc
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle
from math import sqrt
from threading import Lock, Thread
from time import perf_counter
from typing import Any, Protocol

import torch

UNTIMED_STEPS = 2  # bring a contender's code and tensors back into the caches before the step that counts
TURNS_TO_WARM_UP = 20


class Contender(Protocol):
    """A trainer that can make a few steps on request."""

    def turn(self, untimed: int) -> float:
        """Make `untimed` steps and then one more, whose seconds are returned."""
        ...

    def close(self) -> None:
        """Let go of threads and files."""
        ...


class Direct:
    """A contender whose step is a function call in the measuring thread."""

    def __init__(self, step: Callable[[], object], close: Callable[[], object] | None = None) -> None:
        """Take the function that makes one step, and one that tidies up if there is something to tidy."""
        self._step = step
        self._close = close

    def turn(self, untimed: int) -> float:
        """Make `untimed` steps and then one more, whose seconds are returned."""
        for _ in range(untimed):
            self._step()
        started = perf_counter()
        self._step()
        return perf_counter() - started

    def close(self) -> None:
        """Call the function that tidies up."""
        if self._close:
            self._close()


class _Closed(Exception):
    """Raised in a loop that owns itself, from its data iterator, to end it."""


class HandOver:
    """An endless loader that lets the loop reading it run only when it is that loop's turn.

    A step is the time from handing out a batch until the next is asked for. The clock is read in the loop's
    own thread, so the change of threads is outside every measured step.
    """

    def __init__(self, batches: Sequence[Any]) -> None:
        """Take the batches; the loop that reads them waits before the first."""
        self._batches = batches
        self._go, self._arrived = Lock(), Lock()
        self._go.acquire()
        self._arrived.acquire()
        self._steps_left = 0
        self._closing = False
        self.seconds = 0.0
        self.failure: BaseException | None = None

    def __iter__(self) -> Iterator[Any]:
        """Hand out batches, waiting whenever the turn's steps are used up."""
        started = 0.0
        for batch in cycle(self._batches):
            self.seconds = perf_counter() - started
            if not self._steps_left:
                self._wait_for_a_turn()
            self._steps_left -= 1
            started = perf_counter()
            yield batch

    def _wait_for_a_turn(self) -> None:
        self._arrived.release()
        self._go.acquire()
        if self._closing:
            raise _Closed

    def drive(self, loop: Callable[["HandOver"], object]) -> None:
        """Run the loop to its end; the body of its thread."""
        torch.set_num_threads(1)
        try:
            loop(self)
        except BaseException as failure:  # handed to the measuring thread, which raises it
            self.failure = failure
        self._arrived.release()

    def wait(self) -> None:
        """Wait in the measuring thread until the loop asks for a batch it may not have yet."""
        self._arrived.acquire()
        if self.failure and not self._closing:
            raise self.failure

    def advance(self, steps: int) -> float:
        """Let the loop make some steps; the seconds of the last."""
        self._steps_left = steps
        self._go.release()
        self.wait()
        return self.seconds

    def close(self) -> None:
        """End the loop by an exception out of its data iterator."""
        self._closing = True
        self._go.release()


class Threaded:
    """A contender that owns its loop: it runs in a thread and is stopped inside its data iterator."""

    def __init__(self, loop: Callable[[HandOver], object], batches: Sequence[Any]) -> None:
        """Start the loop and wait until it asks for its first batch."""
        self._loader = HandOver(batches)
        self.thread = Thread(target=self._loader.drive, args=(loop,), daemon=True)
        self.thread.start()
        self._loader.wait()

    def turn(self, untimed: int) -> float:
        """Make `untimed` steps and then one more, whose seconds are returned."""
        return self._loader.advance(untimed + 1)

    def close(self) -> None:
        """End the loop and wait a moment for its thread."""
        self._loader.close()
        self.thread.join(timeout=10)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector, which would otherwise run inside a timed step."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def on_one_core() -> Iterator[None]:
    """Keep this thread, and those it starts, on one core where the system allows it.

    A step that is moved to another core finds that one's caches cold, which costs more than what is to be seen.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def interleave(contenders: dict[str, Contender], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of one step per round for each contender, in a new order every round."""
    order = list(contenders)
    shuffle = random.Random(0).shuffle
    for name in order:
        contenders[name].turn(TURNS_TO_WARM_UP * (UNTIMED_STEPS + 1))
    seconds: dict[str, list[float]] = {name: [] for name in order}
    with no_garbage_collection():
        for _ in range(rounds):
            shuffle(order)
            for name in order:
                seconds[name].append(contenders[name].turn(UNTIMED_STEPS))
    return seconds


def standard_error_of_median(values: list[float]) -> float:
    """Half the distance between the order statistics one standard deviation of rank around the middle.

    It assumes nothing about the distribution, whose tail is long here.
    """
    ordered = sorted(values)
    middle, spread = len(ordered) / 2, sqrt(len(ordered)) / 2
    low, high = int(middle - spread), min(int(middle + spread), len(ordered) - 1)
    return (ordered[high] - ordered[low]) / 2


def close_all(contenders: dict[str, Contender]) -> None:
    """Close every contender, also after one of them has failed to close."""
    for contender in contenders.values():
        with suppress(Exception):
            contender.close()
