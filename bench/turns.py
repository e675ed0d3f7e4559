"""Time whole calls of several contenders alternately, and compute what the rows of a table report."""

import gc
import random
from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter

from bench.interleave import standard_error_of_median


def in_turn(runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each contender's calls, in a new order every round."""
    order, shuffle = list(runs), random.Random(0).shuffle
    seconds: dict[str, list[float]] = {name: [] for name in order}
    for name in order:
        runs[name]()
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            seconds[name].append(runs[name]())
    gc.enable()
    return seconds


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    began = perf_counter()
    call()
    return perf_counter() - began


def above(values: list[float], baseline: list[float]) -> tuple[str, str]:
    """Return the median of the paired ratios minus one, and its standard error."""
    ratios = [value / base - 1 for value, base in zip(values, baseline, strict=True)]
    return f"{median(ratios):+.1%}", f"{standard_error_of_median(ratios):.1%}"


def wanted(name: str, only: list[str]) -> bool:
    """Return True if a row was requested."""
    return not only or any(word.lower() in name.lower() for word in only)
