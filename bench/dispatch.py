"""Tight-loop cost of firing an event: without listeners, with ten hooks, with a thousand hooks of other events."""

import gc
from collections.abc import Callable
from statistics import median
from time import thread_time_ns
from typing import Any

import numpy as np

from bench.table import Table
from hookline import HookRegistry, HookRunner, TrainingHook
from hookline.core.schedule import Reading

np.random.seed(0)  # NumPy loads its streams on first use

TITLE = "Cost of firing an event, warm"
COLUMNS = ("event", "µs per firing", "µs per hook", "goal")
NOTES = [
    "The median over the rounds; each round fires one event many times in a tight loop, and the time of an empty loop "
    "is subtracted.",
    "Processor time, because a round is longer than a time slice, and other programs would count otherwise.",
    "Failure isolation is on, and every call is timed, as in a run.",
    "The goal per hook follows from at most 45 µs a step for ten hooks at four events, where caches are cold.",
    "Guarded: torch's, Python's and NumPy's random streams are compared before and after the event.",
]
FIRINGS = 2000


class Quiet(TrainingHook):
    """A hook that does nothing at the event."""

    def on_train_batch_end(self, batch_idx: int) -> None:
        """Nothing."""


class Elsewhere(TrainingHook):
    """A hook of an event that is not fired here."""

    def on_epoch_end(self) -> None:
        """Nothing."""


class Args:
    """The event arguments that these hooks name."""

    step, batch_idx = 1, 0


def registry(listeners: int = 0, elsewhere: int = 0) -> HookRegistry:
    """A registry with hooks of the event, and hooks of other events."""
    made = HookRegistry()
    for index in range(listeners):
        made.register(Quiet(), name=f"quiet_{index}")
    for index in range(elsewhere):
        made.register(Elsewhere(), name=f"elsewhere_{index}")
    return made


def fires(hooks: HookRegistry) -> Callable[[int], None]:
    """Fire the event as the training loop does."""
    slots, args = hooks.slots, Args()

    def loop(count: int) -> None:
        for _ in range(count):
            if handler := slots.on_train_batch_end:
                handler(args)

    return loop


def calls(runner: HookRunner) -> Callable[[int], None]:
    """Fire manually, as a user's own loop does."""

    def loop(count: int) -> None:
        for _ in range(count):
            runner.on_step_end(None)

    return loop


def empty(count: int) -> None:
    """What the loop itself costs."""
    for _ in range(count):
        pass


def seconds(loop: Callable[[int], None]) -> float:
    """One round, per firing."""
    began = thread_time_ns()
    loop(FIRINGS)
    return (thread_time_ns() - began) / FIRINGS / 1e9


def measure(rounds: int, only: list[str]) -> Table:
    """Interleave the rows round by round; `only` has no effect here."""
    del only
    registries = {
        "no listeners": registry(),
        "10 hooks": registry(10),
        "1,000 hooks of other events": registry(0, 1000),
        "10 hooks, streams guarded": registry(10),
    }
    registries["10 hooks, streams guarded"].rng_guard.begin(0)
    loops: dict[str, Callable[[int], None]] = {
        "empty": empty,
        **{name: fires(made) for name, made in registries.items()},
    }
    loops["empty HookRunner, manually"] = calls(HookRunner())
    spent: dict[str, list[float]] = {name: [] for name in loops}
    gc.disable()
    for number in range(1, max(rounds // 4, 32) + 1):
        for made in registries.values():
            made.begin_batch(Reading(steps=number, batches=number, epochs=1))
        for name, loop in loops.items():
            spent[name].append(seconds(loop))
    gc.enable()
    base = median(spent.pop("empty"))
    micros = {name: (median(values) - base) * 1e6 for name, values in spent.items()}
    micros["the guard alone"] = micros["10 hooks, streams guarded"] - micros["10 hooks"]
    return Table(TITLE, COLUMNS, [row(name, value) for name, value in micros.items()], NOTES)


def row(name: str, micros: float) -> tuple[Any, ...]:
    """One line of the table."""
    per_hook = f"{micros / 10:.3f}" if name.startswith("10 ") else ""
    goals = {"the guard alone": "≤ 1.5", "empty HookRunner, manually": "one branch"}
    return name, f"{micros:.3f}", per_hook, goals.get(name, "≤ 1.0 per hook" if per_hook else "≤ 0.1")
