"""What monitors cost a step of about 5 ms on the CPU, each of them every ten steps: one by one, and all together."""

import gc
import random
from collections.abc import Generator, Iterator
from itertools import cycle
from math import hypot
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
from torch import nn

from bench.interleave import no_garbage_collection, standard_error_of_median
from bench.overhead import scratch_directory
from bench.table import Table

TITLE = "Monitors, each every ten steps"
COLUMNS = (
    "contender", "step ms", "a due step more µs", "another step more µs", "on average", "± s.e.", "p99 / median",
    "against none", "goal",
)  # fmt: skip
NOTES = [
    "Model: a small language model (2 blocks, 24 modules, 29 parameters, width 64, context 64, batch 2), AdamW; one"
    " thread. Activations are watched in every module.",
    "Blocks of ten steps of each contender in turn, in a new order every round; the last step of a block is due.",
    "A due step more: median over the rounds of the block's due step less the median of its other nine.",
    "Another step more: median over the rounds of the median of those nine, less that of the block without hooks.",
    "On average: a tenth of the first and all of the second, as a share of a step, and its standard error.",
    "p99 / median: of single steps. The machine interrupts the run without hooks as well: against none is divided by"
    " its value.",
    "Monitors of seed 002: lr_monitor, throughput, gradient_monitor, loss_spike and stall_watchdog. All others:"
    " gradient_flow, json_log and, in every module, activation_stats and monitor.",
]
BLOCK = 10
WARM_UP = 6  # blocks
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
NONE, AGAIN, GOAL = "no hooks", "no hooks, again", "≤ +2 %, ≤ 1.2"
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


def run(monitors: dict[str, dict[str, Any]]) -> Generator[torch.Tensor, None, None]:
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
    return {NONE: {}, AGAIN: {}, **alone, SEED_002: of_seed, ALL: chosen}


def block(steps: Iterator[torch.Tensor]) -> list[float]:
    """Seconds of each of ten steps."""
    spent = []
    for _ in range(BLOCK):
        began = perf_counter()
        next(steps)
        spent.append(perf_counter() - began)
    return spent


def interleaved(runs: dict[str, Generator[torch.Tensor, None, None]], rounds: int) -> dict[str, list[list[float]]]:
    """The blocks of every run, timed in turn."""
    order, shuffle = list(runs), random.Random(0).shuffle
    blocks: dict[str, list[list[float]]] = {name: [] for name in runs}
    for name in order * WARM_UP:
        block(runs[name])
    with no_garbage_collection():
        for _ in range(rounds):
            shuffle(order)
            for name in order:
                blocks[name].append(block(runs[name]))
            gc.collect()
    return blocks


def measure(rounds: int, only: list[str]) -> Table:
    """Time the runs block by block."""
    torch.set_num_threads(1)
    with scratch_directory():
        runs = {name: run(monitors) for name, monitors in contenders(only).items()}
        blocks = interleaved(runs, max(rounds // 6, 20))
        for steps in runs.values():
            steps.close()
    plain = sorted(seconds for part in blocks[NONE] for seconds in part)
    speed = f"A step without hooks that nothing disturbs (the 1st percentile): {plain[len(plain) // 100] * 1e3:.1f} ms."
    return Table(TITLE, COLUMNS, [row(name, blocks) for name in runs], [f"{len(blocks[NONE])} rounds.", speed, *NOTES])


def tail(steps: list[float]) -> float:
    """The 99th percentile against the median."""
    return quantiles(steps, n=100)[98] / median(steps)


def row(name: str, blocks: dict[str, list[list[float]]]) -> tuple[str, ...]:
    """One line of the table."""
    own, none = blocks[name], blocks[NONE]
    single, plain = ([seconds for part in part_of for seconds in part] for part_of in (own, none))
    due = [part[-1] - median(part[:-1]) for part in own]
    other = [median(part[:-1]) - median(base[:-1]) for part, base in zip(own, none, strict=True)]
    average = median(due) / BLOCK + median(other)
    error = hypot(standard_error_of_median(due) / BLOCK, standard_error_of_median(other))
    return (
        name,
        f"{median(single) * 1e3:.2f}",
        microseconds(due),
        "" if name == NONE else microseconds(other),
        f"{average / median(plain):+.1%}",
        f"{error / median(plain):.1%}",
        f"{tail(single):.2f}",
        "" if name == NONE else f"{tail(single) / tail(plain):.2f}",
        GOAL if name in (SEED_002, ALL) else "",
    )


def microseconds(seconds: list[float]) -> str:
    """Their median with its standard error."""
    return f"{median(seconds) * 1e6:.0f} ± {standard_error_of_median(seconds) * 1e6:.0f}"
