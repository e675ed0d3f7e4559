"""What monitors cost a step of about 5 ms on the CPU, each of them every ten steps: one by one, and all together."""

import gc
import random
from collections.abc import Callable, Generator, Iterable, Iterator
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

TITLE = "Monitors, each every ten steps"
COLUMNS = (
    "contender", "step ms", "a due step more µs", "the next more µs", "others more µs", "on average", "± s.e.",
    "due / others", "p99 / median", "against none", "goal",
)  # fmt: skip
NOTES = [
    "Model: a small language model (2 blocks, 24 modules, 29 parameters, width 64, context 64, batch 2), AdamW; one"
    " thread. Activations are watched in every module.",
    "Blocks of ten steps of each contender in turn, in a new order every round, each beside a block of a run"
    " of its own without hooks, before or behind it; the fifth step of a block is due.",
    "Each sitting makes the runs anew: where a run's memory happens to lie moves all its steps by a percent.",
    "A due step more: the block's due step less the median of the eight that are neither due nor next, less the same of"
    " the block beside it. The next: the same of the step behind it, which finds the caches full of other things."
    " Others: the median of those eight, less that of the block beside it. All: the median of a sitting's rounds, then"
    " the mean of the sittings and its standard error.",
    "On average: a tenth of the first two and all of the third, as a share of a step.",
    "Due / others: what p99 / median is where nothing interrupts the steps.",
    "p99 / median: of single steps. The machine interrupts the run without hooks as well: against none is divided by"
    " the value of the blocks beside.",
    "Monitors of seed 002: lr_monitor, throughput, gradient_monitor, loss_spike and stall_watchdog. All others:"
    " gradient_flow, json_log and, in every module, activation_stats and monitor.",
]
Run = Generator[torch.Tensor, None, None]
BLOCK = 10
DUE, NEXT = 4, 5  # of a block's steps
WARM_UP = 3  # blocks
ROUNDS = 10  # a sitting
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
OF_SEED_002 = ("lr_monitor", "throughput", "gradient_monitor", "loss_spike", "stall_watchdog")
NONE, GOAL = "no hooks", "≤ +2 %, ≤ 1.2"
SEED_002, ALL = "monitors of seed 002, all", "and all others"


class Batches:
    """Ready-made batches over and over."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._batches = [torch.randint(96, (2, 65), generator=generator) for _ in range(16)]

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Never ends."""
        return cycle(self._batches)


def step_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Predict the next character."""
    logits = model(batch[:, :-1])["logits"]
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def run(monitors: dict[str, dict[str, Any]]) -> Run:
    """A run of Hookline's trainer with these hooks, to be stepped."""
    from hookline import SimpleTrainer
    from hookline.jobs.char_gpt import CharGPT

    torch.manual_seed(0)
    model = CharGPT(vocab_size=96, context=64, width=64, heads=4, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = SimpleTrainer(
        model, Batches(), optimizer, "cpu", step_fn=step_fn, max_steps=10**9, console=False, warn_above=None
    )
    for name, parameters in monitors.items():
        trainer.add_hook(name, **parameters)
    return trainer.stepper()


def contenders(only: list[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """The rows of the table, and the monitors of each; `only` keeps those whose name contains one of its words."""
    chosen = {name: it for name, it in MONITORS.items() if not only or any(word in name for word in only)}
    alone = {name: {name: it} for name, it in chosen.items()}
    of_seed = {name: it for name, it in chosen.items() if name in OF_SEED_002}
    return {NONE: {}, **alone, SEED_002: of_seed, ALL: chosen}


def block(steps: Iterator[torch.Tensor]) -> list[float]:
    """Seconds of each of ten steps."""
    spent = []
    for _ in range(BLOCK):
        began = perf_counter()
        next(steps)
        spent.append(perf_counter() - began)
    return spent


class Blocks(NamedTuple):
    """What one contender's blocks took in one sitting, and the blocks without hooks beside them."""

    own: list[list[float]]
    bare: list[list[float]]

    def more(self, of: Callable[[list[float]], float]) -> float:
        """How much more something of a block is than of the block beside it, in seconds."""
        return median(of(own) - of(bare) for own, bare in zip(*self, strict=True))


def others(part: list[float]) -> float:
    """What a step took that was neither due nor next."""
    return median(seconds for place, seconds in enumerate(part) if place not in (DUE, NEXT))


def due_step(part: list[float]) -> float:
    """How much longer the due one took than those."""
    return part[DUE] - others(part)


def next_step(part: list[float]) -> float:
    """And the one behind it."""
    return part[NEXT] - others(part)


def sitting(monitors: dict[str, dict[str, dict[str, Any]]], chance: random.Random) -> dict[str, Blocks]:
    """The blocks of new runs and of their bare twins, timed in turn."""
    pairs = {name: (run(it), run({})) for name, it in monitors.items()}
    order, blocks = list(pairs), {name: Blocks([], []) for name in pairs}
    for steps in chain.from_iterable(pairs.values()):
        for _ in range(WARM_UP):
            block(steps)
        for _ in range(BLOCK - DUE - 1):
            next(steps)
    with no_garbage_collection():
        for _ in range(ROUNDS):
            chance.shuffle(order)
            for name in order:
                for place in chance.sample((0, 1), 2):
                    blocks[name][place].append(block(pairs[name][place]))
            gc.collect()
    for steps in chain.from_iterable(pairs.values()):
        steps.close()
    return blocks


def measure(rounds: int, only: list[str]) -> Table:
    """Time the runs block by block."""
    torch.set_num_threads(1)
    chance, monitors, many = random.Random(0), contenders(only), max(rounds // (6 * ROUNDS), 3)
    with scratch_directory():
        sittings = [sitting(monitors, chance) for _ in range(many)]
    plain = sorted(singles(one[NONE].own for one in sittings))
    speed = f"A step without hooks that nothing disturbs (the 1st percentile): {plain[len(plain) // 100] * 1e3:.1f} ms."
    rows = [row(name, [one[name] for one in sittings]) for name in monitors]
    return Table(TITLE, COLUMNS, rows, [f"{many} sittings of {ROUNDS} rounds.", speed, *NOTES])


def singles(sittings: Iterable[list[list[float]]]) -> list[float]:
    """The steps of all blocks."""
    return [seconds for blocks in sittings for part in blocks for seconds in part]


def tail(steps: list[float]) -> float:
    """The 99th percentile against the median."""
    return quantiles(steps, n=100)[98] / median(steps)


def row(name: str, sittings: list[Blocks]) -> tuple[str, ...]:
    """One line of the table."""
    due, behind, rest = ([one.more(of) for one in sittings] for of in (due_step, next_step, others))
    average = [(first + second) / BLOCK + third for first, second, third in zip(due, behind, rest, strict=True)]
    steps, plain = singles(one.own for one in sittings), singles(one.bare for one in sittings)
    step = median(plain)
    return (
        name,
        f"{median(steps) * 1e3:.2f}",
        microseconds(due),
        microseconds(behind),
        microseconds(rest),
        f"{mean(average) / step:+.1%}",
        f"{error_of_mean(average) / step:.1%}",
        f"{1 + mean(due) / step:.2f}",
        f"{tail(steps):.2f}",
        f"{tail(steps) / tail(plain):.2f}",
        GOAL if name in (SEED_002, ALL) else "",
    )


def microseconds(seconds: list[float]) -> str:
    """Their mean with its standard error."""
    return f"{mean(seconds) * 1e6:.0f} ± {error_of_mean(seconds) * 1e6:.0f}"


def error_of_mean(values: list[float]) -> float:
    return stdev(values) / sqrt(len(values))
