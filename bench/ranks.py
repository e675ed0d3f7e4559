"""Microseconds per step of two ranks under DDP, for Hookline and Accelerate, above a plain DDP loop.

Both ranks are forked from one process and make the same steps in the same order. What is timed are blocks of steps of
rank 0, because Hookline's ranks agree in some of them only; a step ends when the collective of its backward pass does,
so the other rank's delays are in it.
"""

import json
import os
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NoReturn

import torch
from torch import distributed, nn

from bench.interleave import Contender, Direct, close_all, interleave, standard_error_of_median
from bench.overhead import scratch_directory
from bench.table import Table
from hookline.run import progress

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TITLE = f"Step of two ranks (DDP over gloo, {'one GPU' if DEVICE == 'cuda' else 'CPU'})"
COLUMNS = ("model", "contender", "step µs", "above plain DDP µs", "± s.e.", "above, %", "goal")
NOTES = [
    "Models: MLP 64-256-256-10 with batches of 64 per rank, and 64-1024-1024-10 with batches of 256; SGD.",
    "Above plain DDP: the median of the paired differences in each round.",
    "One small all-reduce: plain DDP, and a sum of seven integers over a gloo group, which begins after each step and "
    "is awaited after the next.",
    "Accelerate: the loop from its documentation, on the same model.",
    "Monitors: activation_stats, gradient_monitor, throughput and lr_monitor, each every 10 steps.",
    "Each rank has half of the cores and one torch thread; on two cores, gloo's threads take time away from training.",
]
STEPS_WITHOUT_END = 1_000_000_000
BLOCK = 20  # timed steps of a contender in each round: Hookline's ranks agree in two of them
MONITORS = ("activation_stats", "gradient_monitor", "throughput", "lr_monitor")


@dataclass(frozen=True)
class Job:
    """What a rank trains: a perceptron of some width, and batches of some size."""

    name: str
    width: int
    batch: int


JOBS = (Job("small", 256, 64), Job("large", 1024, 256))


class Blocks(Direct):
    """A contender whose mean step in a block is timed; the clock of its run stands still between its turns."""

    def __init__(self, step: Callable[[], object], close: Callable[[], object] | None = None) -> None:
        super().__init__(step, close)
        self._seconds = 0.0

    def turn(self, untimed: int) -> float:
        """Make `untimed` steps and then a block, and return the mean seconds of its steps."""
        began = perf_counter()
        progress.monotonic = lambda: self._seconds + perf_counter() - began  # type: ignore[attr-defined]
        for _ in range(untimed):
            self._step()
        started = perf_counter()
        for _ in range(BLOCK):
            self._step()
        ended = perf_counter()
        self._seconds += ended - began
        return (ended - started) / BLOCK


class Endless:
    """Batches without end, a few different ones."""

    def __init__(self, rank: int, job: Job) -> None:
        made, size = torch.Generator().manual_seed(rank), job.batch
        self._batches = [
            (torch.randn(size, 64, generator=made).to(DEVICE), torch.randint(10, (size,), generator=made).to(DEVICE))
            for _ in range(8)
        ]

    def __iter__(self) -> Any:
        while True:
            yield from self._batches


def make_model(job: Job) -> nn.Module:
    """Make the model with the same weights on both ranks."""
    torch.manual_seed(0)
    width = job.width
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    return model.to(DEVICE)


def plain(rank: int, job: Job, agrees: bool = False) -> Contender:
    """Make the plain DDP loop; with a small all-reduce a step that is awaited after the next one, if `agrees`."""
    model = nn.parallel.DistributedDataParallel(make_model(job))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batches = iter(Endless(rank, job))
    group = distributed.new_group(backend="gloo") if agrees else None
    sent: list[Any] = []

    def step() -> None:
        inputs, targets = next(batches)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if agrees:
            sent.append(distributed.all_reduce(torch.tensor([1] * 7), group=group, async_op=True))
            if len(sent) > 1:
                sent.pop(0).wait()

    return Blocks(step)


def accelerate(rank: int, job: Job) -> Contender:
    """Make Accelerate's loop."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=DEVICE == "cpu")
    model = make_model(job)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    batches = iter(Endless(rank, job))

    def step() -> None:
        inputs, targets = next(batches)
        accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()

    return Blocks(step)


def hookline(rank: int, job: Job, monitors: bool = False) -> Contender:
    """Make Hookline's loop, with its record on rank 0."""
    from hookline import SimpleTrainer

    model = nn.parallel.DistributedDataParallel(make_model(job))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    trainer = SimpleTrainer(
        model, Endless(rank, job), optimizer, DEVICE, loss_fn=nn.functional.cross_entropy,
        max_steps=STEPS_WITHOUT_END, console=False, seed=0,
    )  # fmt: skip
    for name in MONITORS if monitors else ():
        trainer.add_hook(name, every=10)
    steps: Any = trainer.stepper()
    return Blocks(steps.__next__, steps.close)


CONTENDERS: dict[str, Callable[[int, Job], Contender]] = {
    "plain DDP": plain,
    "plain DDP, one small all-reduce": lambda rank, job: plain(rank, job, agrees=True),
    "Hookline": hookline,
    "Accelerate": accelerate,
    "Hookline, all monitors every 10 steps": lambda rank, job: hookline(rank, job, monitors=True),
}
GOALS = {"Hookline": "2 % at 2.5 ms, below Accelerate", "Hookline, all monitors every 10 steps": "4 % more"}


def run_rank(rank: int, store: str, job: Job, rounds: int, only: list[str]) -> dict[str, list[float]]:
    """Make the steps of one rank, and return their seconds by contender."""
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")  # else Accelerate sets more threads than cores
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    os.environ["LOCAL_RANK"] = "0" if DEVICE == "cuda" else str(rank)  # the GPU that Accelerate uses
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, set(cores[rank::2] or cores))
    distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    wanted = [name for name in CONTENDERS if not only or any(word in name.lower() for word in [*only, "plain"])]
    present = [name for name in wanted if name != "Accelerate" or find_spec("accelerate")]
    contenders = {name: CONTENDERS[name](rank, job) for name in present}
    try:
        return interleave(contenders, rounds)
    finally:
        close_all(contenders)


def measure(rounds: int, only: list[str]) -> Table:
    """Fork two ranks for each job, and tabulate what the first one measured."""
    import hookline.build  # the ranks need not import it

    assert hookline.build
    seconds: dict[str, dict[str, list[float]]] = {}
    for job in JOBS:
        with scratch_directory(), tempfile.TemporaryDirectory() as folder:
            ranks = [os.fork() or _run_and_exit(rank, folder, job, rounds, only) for rank in (0, 1)]
            for process in ranks:
                if os.waitpid(process, 0)[1]:
                    raise RuntimeError("a rank has failed")
            seconds[job.name] = json.loads(Path(folder, "seconds.json").read_text())
    lines = []
    for job, by_name in seconds.items():
        base = by_name["plain DDP"]
        for name, own in by_name.items():
            above = [(one - other) * 1e6 for one, other in zip(own, base, strict=True)]
            extra = median(above)
            cells = (f"{extra:.1f}", f"{standard_error_of_median(above):.1f}", f"{extra / median(base) / 1e4:.1f}")
            shown = ("", "", "") if name == "plain DDP" else cells
            lines.append((job, name, f"{median(own) * 1e6:.1f}", *shown, GOALS.get(name, "")))
    return Table(TITLE, COLUMNS, lines, [f"{rounds} rounds; in each, the mean of {BLOCK} timed steps.", *NOTES])


def _run_and_exit(rank: int, folder: str, job: Job, rounds: int, only: list[str]) -> NoReturn:
    try:
        seconds = run_rank(rank, f"{folder}/store", job, rounds, only)
        if rank == 0:
            Path(folder, "seconds.json").write_text(json.dumps(seconds))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
