"""Measure what monitors add to a step of about 5 ms on the CPU, each every ten steps: one by one, and together."""

import gc
import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, cycle
from math import sqrt
from statistics import mean, median, quantiles, stdev
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn

from bench.interleave import no_garbage_collection
from bench.overhead import scratch_directory
from bench.table import Table
from hookline import SimpleTrainer
from hookline.demo.char_gpt import CharGPT

TITLE = "Monitors, each every ten steps"
COLUMNS = (
    "contender", "step ms", "a due step more µs", "the next more µs", "others more µs", "on average", "± s.e.",
    "due / others", "p99 / median", "against none", "goal",
)  # fmt: skip
NOTES = [
    "Model: a small language model (2 blocks, 24 modules, 29 parameters, width 64, context 64, batch 2), AdamW; one"
    " thread. Activations are watched in every module.",
    "One run at a time, because a run usually has a machine to itself, with its hooks alternately enabled and "
    "disabled: ten steps that are not timed, then twenty that are. Two runs cannot be compared as closely, because "
    "the layout of their memory makes a difference of a few percent.",
    "More: the median of an interval's due steps, of the steps after them, and of the other eight in ten, each minus "
    "that of the paired interval with the hooks disabled, at the same positions. Of these, the median over a "
    "session's intervals, then the mean over the sessions, each a new run, with its standard error.",
    "On average: one tenth of each of the first two plus eight tenths of the third, as a share of a step without "
    "hooks.",
    "Due / others: the value that p99 / median has if nothing interrupts the steps.",
    "p99 / median: for single steps. The machine also interrupts the steps without hooks, so the column against none "
    "divides by their value.",
    "The three monitors of document 002: lr_monitor, throughput, gradient_monitor. All others: gradient_flow, json_log"
    " and, in every module, activation_stats and monitor.",
]
BLOCK = 10
DUE, NEXT, OTHERS = 4, 5, (0, 1, 2, 3, 6, 7, 8, 9)  # of a block's steps
TIMED = 2  # blocks of an interval, after one that is not timed
WARM_UP = 3  # blocks
INTERVALS = 20  # of a session, with the hooks enabled; as many with them disabled
MONITORS: dict[str, dict[str, Any]] = {
    "lr_monitor": {"every": 10},
    "throughput": {"log_every_n_steps": 10},
    "gradient_monitor": {"log_frequency": 10},
    "gradient_flow": {"every": 10},
    "activation_stats": {"every": 10},
    "monitor": {"every": 10},
    "loss_spike": {"every": 10},
    "json_log": {"log_every_n_batches": 10},
    "stall_watchdog": {},
}
OF_SEED_002 = ("lr_monitor", "throughput", "gradient_monitor")
WATCHING = ("loss_spike", "stall_watchdog")
NONE, GOAL = "no hooks", "≤ +2 %, ≤ 1.2"
THREE, FIVE, ALL = "the three monitors of document 002", "with loss_spike and stall_watchdog", "and all others"
MOMENTS = "the three, with gradients' moments"


class Batches:
    """An endless loader of prepared batches."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._batches = [torch.randint(96, (2, 65), generator=generator) for _ in range(16)]

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Repeat the batches."""
        return cycle(self._batches)


def step_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Predict the next character."""
    logits = model(batch[:, :-1])["logits"]
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def new_trainer(monitors: dict[str, dict[str, Any]]) -> SimpleTrainer:
    """Make a trainer with these hooks."""
    torch.manual_seed(0)
    model = CharGPT(vocab_size=96, context=64, width=64, heads=4, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = SimpleTrainer(
        model, Batches(), optimizer, "cpu", step_fn=step_fn, max_steps=10**9, console=False, warn_above=None
    )
    for name, parameters in monitors.items():
        trainer.add_hook(name, **parameters)
    return trainer


def contenders(only: list[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the rows of the table with the monitors of each; `only` keeps names that contain one of its words."""
    alone = {name: {name: it} for name, it in MONITORS.items()}
    three = {name: MONITORS[name] for name in OF_SEED_002}
    moments = {**three, "gradient_monitor": {"log_frequency": 10, "log_moments": True}}
    five = {**three, **{name: MONITORS[name] for name in WATCHING}}
    rows = {**alone, THREE: three, MOMENTS: moments, FIVE: five, ALL: MONITORS}
    return {NONE: {}, **{name: it for name, it in rows.items() if not only or any(word in name for word in only)}}


def block(steps: Iterator[torch.Tensor]) -> list[float]:
    """Make ten steps and return the seconds of each."""
    spent = []
    for _ in range(BLOCK):
        began = perf_counter()
        next(steps)
        spent.append(perf_counter() - began)
    return spent


class Session(NamedTuple):
    """Seconds of the timed steps of one run, by interval."""

    disabled: list[list[float]]
    enabled: list[list[float]]

    def added(self, positions: Sequence[int]) -> float:
        """Return how many seconds the hooks add to a step at these positions of a block."""
        pairs = zip(self.disabled, self.enabled, strict=True)
        return median(at(enabled, positions) - at(disabled, positions) for disabled, enabled in pairs)


def at(steps: list[float], positions: Sequence[int]) -> float:
    """Return the median seconds of the steps at these positions of their blocks."""
    return median(seconds for number, seconds in enumerate(steps) if number % BLOCK in positions)


def time_run(monitors: dict[str, dict[str, Any]], chance: random.Random) -> Session:
    """Time a new run, with its hooks enabled and disabled in alternation."""
    trainer, session = new_trainer(monitors), Session([], [])
    steps = trainer.stepper()
    for _ in range(WARM_UP * BLOCK + BLOCK - DUE - 1):
        next(steps)
    with no_garbage_collection():
        for _ in range(INTERVALS):
            for enabled in chance.sample((False, True), 2):
                switch = trainer.enable_hook if enabled else trainer.disable_hook
                for name in monitors:
                    switch(name)
                block(steps)
                session[enabled].append([seconds for _ in range(TIMED) for seconds in block(steps)])
            gc.collect()
    steps.close()
    return session


def measure(rounds: int, only: list[str]) -> Table:
    """Time several runs of each contender, in random order."""
    torch.set_num_threads(1)
    chance, monitors, many = random.Random(0), contenders(only), max(rounds // 100, 3)
    sessions: dict[str, list[Session]] = {name: [] for name in monitors}
    with scratch_directory():
        for _ in range(many):
            for name in chance.sample(list(monitors), len(monitors)):
                sessions[name].append(time_run(monitors[name], chance))
    plain = sorted(singles(one.disabled for one in chain.from_iterable(sessions.values())))
    best = plain[len(plain) // 100] * 1e3
    speed = f"A step without hooks that nothing disturbs (the 1st percentile): {best:.1f} ms."
    rows = [row(name, timed) for name, timed in sessions.items()]
    return Table(TITLE, COLUMNS, rows, [f"{many} sessions of {INTERVALS} intervals.", speed, *NOTES])


def singles(sessions: Iterable[list[list[float]]]) -> list[float]:
    """Return the steps of all intervals."""
    return [seconds for intervals in sessions for steps in intervals for seconds in steps]


def tail(steps: list[float]) -> float:
    """Return the 99th percentile divided by the median."""
    return quantiles(steps, n=100)[98] / median(steps)


def row(name: str, sessions: list[Session]) -> tuple[str, ...]:
    """Return one row of the table."""
    due, behind, rest = ([one.added(positions) for one in sessions] for positions in ([DUE], [NEXT], OTHERS))
    eight = len(OTHERS)
    average = [(first + second + eight * third) / BLOCK for first, second, third in zip(due, behind, rest, strict=True)]
    steps, plain = singles(one.enabled for one in sessions), singles(one.disabled for one in sessions)
    step = median(plain)
    return (
        name,
        f"{step * 1e3:.2f}",
        microseconds(due),
        microseconds(behind),
        microseconds(rest),
        f"{mean(average) / step:+.1%}",
        f"{error_of_mean(average) / step:.1%}",
        f"{1 + (mean(due) - mean(rest)) / step:.2f}",
        f"{tail(steps):.2f}",
        f"{tail(steps) / tail(plain):.2f}",
        GOAL if name in (THREE, FIVE, ALL) else "",
    )


def microseconds(seconds: list[float]) -> str:
    """Format the mean of some times with its standard error."""
    return f"{mean(seconds) * 1e6:.0f} ± {error_of_mean(seconds) * 1e6:.0f}"


def error_of_mean(values: list[float]) -> float:
    return stdev(values) / sqrt(len(values))
