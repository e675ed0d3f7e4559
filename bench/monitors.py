"""What monitors cost a step of about 5 ms on the CPU, each of them every ten steps: one by one, and all together."""

import gc
import random
from collections.abc import Generator, Iterator
from itertools import cycle
from statistics import fmean, median, quantiles, stdev
from time import perf_counter
from typing import Any

import torch
from torch import nn

from bench.interleave import no_garbage_collection, standard_error_of_median
from bench.overhead import scratch_directory
from bench.table import Table

TITLE = "Monitors, each every ten steps"
COLUMNS = (
    "contender", "step ms", "above none", "± s.e.", "a due step more µs", "a tenth of that", "p99 / median",
    "against none", "goal",
)  # fmt: skip
NOTES = [
    "Model: a small language model (2 blocks, 24 modules, 29 parameters, width 64, context 64, batch 2), AdamW; one"
    " thread. Activations are watched in every module.",
    "Blocks of ten steps of each contender in turn, in a new order every round; the last step of a block is due.",
    "Above none: mean over the rounds of (block / block without hooks) - 1, less the 5 % at either end, where the"
    " machine's own interruptions are.",
    "A due step more: median over the blocks of the due step less the median of the block's other nine.",
    "A tenth of that, as a share of a step, is what due steps cost on average. It is steadier than above none, which"
    " has the other nine as well.",
    "p99 / median: of single steps. The machine interrupts the run without hooks as well: against none is divided by"
    " its value.",
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
OF_ACTIVATIONS = ("activation_stats", "monitor")
NONE, AGAIN, MOST, ALL = "no hooks", "no hooks, again", "all but activations", "all of them"


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
    most = {name: it for name, it in chosen.items() if name not in OF_ACTIVATIONS}
    return {NONE: {}, AGAIN: {}, **alone, MOST: most, ALL: chosen}


def block(steps: Iterator[torch.Tensor]) -> list[float]:
    """Seconds of each of ten steps."""
    spent = []
    for _ in range(BLOCK):
        began = perf_counter()
        next(steps)
        spent.append(perf_counter() - began)
    return spent


def trimmed(values: list[float]) -> list[float]:
    """The values without the 5 % at either end."""
    cut = len(values) // 20
    return sorted(values)[cut : len(values) - cut] if cut else values


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
    return Table(TITLE, COLUMNS, [row(name, blocks) for name in runs], [f"{len(blocks[NONE])} rounds.", *NOTES])


def tail(steps: list[float]) -> float:
    """The 99th percentile against the median."""
    return quantiles(steps, n=100)[98] / median(steps)


def row(name: str, blocks: dict[str, list[list[float]]]) -> tuple[str, ...]:
    """One line of the table."""
    own, none = blocks[name], blocks[NONE]
    single = [seconds for part in own for seconds in part]
    above = trimmed([sum(part) / sum(base) - 1 for part, base in zip(own, none, strict=True)])
    more = [part[-1] - median(part[:-1]) for part in own]
    share, error = f"{fmean(above):+.1%}", f"{stdev(above) / len(above) ** 0.5:.1%}"
    return (
        name,
        f"{median(single) * 1e3:.2f}",
        *(("", "") if name == NONE else (share, error)),
        f"{median(more) * 1e6:.0f} ± {standard_error_of_median(more) * 1e6:.0f}",
        f"{median(more) / BLOCK / median(single):+.1%}",
        f"{tail(single):.2f}",
        "" if name == NONE else f"{tail(single) / tail([seconds for part in none for seconds in part]):.2f}",
        "≤ +2 %, ≤ 1.2" if name == ALL else "",
    )
