"""What all monitors together cost a step of about 5 ms on the CPU, each of them every ten steps."""

import gc
from collections.abc import Iterator
from itertools import cycle
from statistics import fmean, median, quantiles
from time import perf_counter
from typing import Any

import torch
from torch import nn

from bench.overhead import scratch_directory
from bench.table import Table

TITLE = "All monitors on, each every ten steps"
COLUMNS = ("contender", "median ms", "mean ms", "above none", "99th percentile / median", "goal")
NOTES = [
    "Model: a small language model (2 blocks, width 128, context 64, batch 8), AdamW; one thread.",
    "Blocks of ten steps of each contender in turn; above none: the mean over blocks of (monitored / none) - 1, without"
    " the 5 % at either end, where the machine's own interruptions are.",
    "Percentile: of single steps; that of the run without hooks shows what the machine does by itself.",
]
BLOCK = 10
MONITORS: list[tuple[str, dict[str, Any]]] = [
    ("lr_monitor", {"every": 10}),
    ("throughput", {"log_every_n_steps": 10}),
    ("gradient_monitor", {"log_frequency": 10}),
    ("activation_stats", {"every": 10}),
    ("monitor", {"every": 10, "metrics": ["mean", "std", "absmax", "zeros", "nans", "infs"]}),
    ("gradient_flow", {"every": 10}),
    ("loss_spike", {"every": 10}),
    ("json_log", {"log_every_n_batches": 10}),
    ("stall_watchdog", {}),
]


class Batches:
    """Ready-made batches over and over."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._batches = [torch.randint(96, (8, 65), generator=generator) for _ in range(16)]

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Never ends."""
        return cycle(self._batches)


def step_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Predict the next character."""
    logits = model(batch[:, :-1])["logits"]
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def run(monitors: list[tuple[str, dict[str, Any]]]) -> Iterator[torch.Tensor]:
    """A run of Hookline's trainer with these hooks, to be stepped."""
    from hookline import SimpleTrainer
    from hookline.jobs.char_gpt import CharGPT

    torch.manual_seed(0)
    model = CharGPT(vocab_size=96, context=64, width=128, heads=4, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = SimpleTrainer(
        model, Batches(), optimizer, "cpu", step_fn=step_fn, max_steps=10**9, console=False, warn_above=None
    )
    for name, parameters in monitors:
        trainer.add_hook(name, **parameters)
    return trainer.stepper()


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


def measure(rounds: int, only: list[str]) -> Table:
    """Time the runs block by block."""
    torch.set_num_threads(1)
    wanted = [(name, parameters) for name, parameters in MONITORS if not only or any(word in name for word in only)]
    with scratch_directory():
        runs = {"no hooks": run([]), "again, no hooks": run([]), f"{len(wanted)} monitors": run(wanted)}
        for steps in runs.values():
            for _ in range(3):
                block(steps)
        blocks: dict[str, list[list[float]]] = {name: [] for name in runs}
        gc.disable()
        for _ in range(max(rounds // 6, 20)):
            for name, steps in runs.items():
                blocks[name].append(block(steps))
        gc.enable()
        for steps in runs.values():
            steps.close()  # type: ignore[attr-defined]
    return Table(TITLE, COLUMNS, [row(name, blocks) for name in runs], NOTES)


def row(name: str, blocks: dict[str, list[list[float]]]) -> tuple[str, ...]:
    """One line of the table."""
    own, none = blocks[name], blocks["no hooks"]
    steps = [seconds for part in own for seconds in part]
    above = [sum(part) / sum(base) - 1 for part, base in zip(own, none, strict=True)]
    tail = quantiles(steps, n=100)[98] / median(steps)
    monitored = name.endswith("monitors")
    return (
        name,
        f"{median(steps) * 1e3:.2f}",
        f"{fmean(trimmed(steps)) * 1e3:.2f}",
        "" if name == "no hooks" else f"{fmean(trimmed(above)):+.1%}",
        f"{tail:.2f}",
        "≤ +2 %, ≤ 1.2" if monitored else "",
    )
