"""Microseconds per step of two ranks under DDP, for Hookline and Accelerate, above a plain DDP loop.

Both ranks are forked from this process and make the same steps in the same order. What is timed is a step of rank 0;
a step ends when the collective of its backward pass does, so the other rank's delays are in it.
"""

import os
import tempfile
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from torch import distributed, nn

from bench.interleave import Contender, Direct, close_all, interleave, standard_error_of_median
from bench.overhead import scratch_directory
from bench.table import Table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TITLE = f"Step of two ranks (DDP over gloo, {'one GPU' if DEVICE == 'cuda' else 'CPU'})"
COLUMNS = ("contender", "step µs", "above plain DDP µs", "± s.e.", "above, %", "goal")
NOTES = [
    "Model: MLP 64-256-256-10, batch 64 a rank, SGD. Above plain DDP: median of the paired differences in each round.",
    "Accelerate: its loop as its documentation has it, on the same model.",
    "Monitors: activation_stats, gradient_monitor, throughput and lr_monitor, each every 10 steps; the 10th step"
    " is timed like any other, so the median does not show it and the mean does.",
    "Each rank has one core.",
]
STEPS_WITHOUT_END = 1_000_000_000
MONITORS = ("activation_stats", "gradient_monitor", "throughput", "lr_monitor")


class Endless:
    """Batches without end, a few different ones."""

    def __init__(self, rank: int) -> None:
        made = torch.Generator().manual_seed(rank)
        self._batches = [
            (torch.randn(64, 64, generator=made).to(DEVICE), torch.randint(10, (64,), generator=made).to(DEVICE))
            for _ in range(8)
        ]

    def __iter__(self) -> Any:
        while True:
            yield from self._batches


def make_model() -> nn.Module:
    """Make the model with the same weights on both ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return model.to(DEVICE)


def plain(rank: int) -> Contender:
    """Make the plain DDP loop."""
    model = nn.parallel.DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batches = iter(Endless(rank))

    def step() -> None:
        inputs, targets = next(batches)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Direct(step)


def accelerate(rank: int) -> Contender:
    """Make Accelerate's loop."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=DEVICE == "cpu")
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    batches = iter(Endless(rank))

    def step() -> None:
        inputs, targets = next(batches)
        accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()

    return Direct(step)


def hookline(rank: int, monitors: bool = False) -> Contender:
    """Make Hookline's loop, with its record on rank 0."""
    from hookline import SimpleTrainer

    model = nn.parallel.DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    trainer = SimpleTrainer(
        model, Endless(rank), optimizer, DEVICE, loss_fn=nn.functional.cross_entropy,
        max_steps=STEPS_WITHOUT_END, console=False, seed=0,
    )  # fmt: skip
    for name in MONITORS if monitors else ():
        trainer.add_hook(name, every=10)
    steps: Any = trainer.stepper()
    return Direct(steps.__next__, steps.close)


CONTENDERS: dict[str, Callable[[int], Contender]] = {
    "plain DDP": plain,
    "Hookline": hookline,
    "Accelerate": accelerate,
    "Hookline, all monitors every 10 steps": lambda rank: hookline(rank, monitors=True),
}
GOALS = {"Hookline": "5 % + 20 µs, below Accelerate", "Hookline, all monitors every 10 steps": "4 % more"}


def run_rank(rank: int, store: str, rounds: int, only: list[str]) -> dict[str, list[float]]:
    """Make the steps of one rank."""
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")  # else Accelerate sets more threads than cores
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    wanted = [name for name in CONTENDERS if not only or any(word in name.lower() for word in [*only, "plain"])]
    contenders = {name: CONTENDERS[name](rank) for name in wanted if name != "Accelerate" or find_spec("accelerate")}
    try:
        return interleave(contenders, rounds)
    finally:
        close_all(contenders)


def measure(rounds: int, only: list[str]) -> Table:
    """Fork the second rank, and tabulate what the first one measured."""
    import hookline.build  # both ranks import it once

    assert hookline.build
    with scratch_directory(), tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        child = os.fork()
        if child == 0:
            try:
                run_rank(1, store, rounds, only)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        seconds = run_rank(0, store, rounds, only)
        os.waitpid(child, 0)
    base = seconds["plain DDP"]
    lines = []
    for name, own in seconds.items():
        above = [(one - other) * 1e6 for one, other in zip(own, base, strict=True)]
        extra = median(above)
        cells = (f"{extra:.1f}", f"{standard_error_of_median(above):.1f}", f"{extra / median(base) / 1e4:.1f}")
        shown = ("", "", "") if name == "plain DDP" else cells
        lines.append((name, f"{median(own) * 1e6:.1f}", *shown, GOALS.get(name, "")))
    return Table(TITLE, COLUMNS, lines, [f"{rounds} rounds, one timed step each.", *NOTES])
