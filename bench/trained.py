"""Measure what monitors that work at every step add to training a GPT with our trainer, beside a bare loop.

Source trees can be compared: `BENCH_TREES=old=/path/to/src,new=src python -m bench trained`. Each tree trains in a
process of its own, and these take turns.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir
from functools import partial
from itertools import repeat
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.gpt import GPT, VOCABULARY
from bench.table import Table
from bench.turns import above, in_turn, wanted

TITLE = "Monitors at every step, through the trainer"
COLUMNS = (
    "model: run",
    "ms",
    "above bare",
    "± s.e.",
    "goal",
    "µs above no hooks",
    "kernels ms",
    "ours ms",
    "queued ms",
)
NOTES = [
    "GPT-2 small: batch 8 x 1024, fused AdamW, pure bf16; autocast: float32 parameters, bf16 autocast.",
    "Host: the same modules, but so small that a step takes only the time that the host needs to launch it.",
    "Above: median over the rounds of (step / bare step of the same tree - 1) in the same round.",
    "Kernels: the time of all kernels of a step; ours: that of Hookline's kernels. Queued: the time until the host "
    "had launched the last one.",
]
BARE, NONE = "bare loop", "no hooks"
STATISTICS = ("mean", "std", "absmax", "zeros", "nans", "infs")
OUR_KERNELS = ("read_chunks", "merge_chunks", "count_chunks")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UNTIMED = 2  # steps before the timed ones of a turn
PROFILED = 3  # steps


class Model(NamedTuple):
    """A model to train, and how many steps a turn has."""

    width: int
    heads: int
    batch: int
    length: int
    vocabulary: int = VOCABULARY
    autocast: bool = False
    steps: int = 10


HOST = "host"
MODELS = {
    "GPT-2 small": Model(768, 12, 8, 1024),
    "autocast": Model(768, 12, 8, 1024, autocast=True),
    HOST: Model(32, 2, 1, 16, vocabulary=256, steps=20),
}


def is_leaf(name: str, module: nn.Module) -> bool:
    """Return whether a module has no children."""
    return not list(module.children())


HOOKS: dict[str, tuple[str, dict[str, Any]]] = {
    "statistics": ("monitor", {"modules": is_leaf, "metrics": list(STATISTICS)}),
    "norms and moments": ("gradient_monitor", {"log_frequency": 1, "log_moments": True}),
    "histograms": ("monitor", {"modules": is_leaf, "metrics": [*STATISTICS, "histogram"]}),
}
GOALS = {"statistics": "≤ +5 %", "norms and moments": "≤ +1.5 %", "histograms": "≤ +20 %"}
RUNS = (BARE, NONE, *HOOKS)


# ---- one tree, in its own process ------------------------------------------------------------------------------------


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Predict each token from those before it."""
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def bare_steps(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, autocast: bool) -> Iterator[None]:
    """Train without Hookline, one step for each `next()`."""
    while True:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            loss = next_token_loss(model, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


class Endless:
    """A loader that repeats one batch."""

    def __init__(self, batch: Tensor) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[Tensor]:
        """Repeat the batch."""
        return repeat(self._batch)


def make_steps(size: Model, run: str) -> Iterator[Any]:
    """Return a new training, one step for each `next()`."""
    from hookline import SimpleTrainer  # In a worker only: here is where the trees differ.

    torch.manual_seed(0)
    dtype = torch.float32 if size.autocast or DEVICE == "cpu" else torch.bfloat16
    model = GPT(size.width, size.heads, vocabulary=size.vocabulary, length=size.length).to(DEVICE, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    tokens = torch.randint(size.vocabulary, (size.batch, size.length + 1), device=DEVICE)
    if run == BARE:
        return bare_steps(model, optimizer, tokens, size.autocast)
    trainer = SimpleTrainer(
        model, Endless(tokens), optimizer, DEVICE, step_fn=next_token_loss, max_steps=10**9, console=False,
        warn_above=None, precision="bf16" if size.autocast else "fp32",
    )  # fmt: skip
    if run in HOOKS:
        name, options = HOOKS[run]
        trainer.add_hook(name, **options)
    return trainer.stepper()


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def time_turn(steps: Iterator[Any], many: int) -> tuple[float, float]:
    """Return the seconds of a step, and those until the host had launched it."""
    for _ in range(UNTIMED):
        next(steps)
    synchronize()
    began = perf_counter()
    for _ in range(many):
        next(steps)
    queued = perf_counter()
    synchronize()
    return (perf_counter() - began) / many, (queued - began) / many


def kernel_times(steps: Iterator[Any]) -> tuple[float, float] | None:
    """Return the seconds that all kernels of a step take, and those of ours; None if they cannot be profiled."""
    if DEVICE != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(PROFILED):
                next(steps)
            synchronize()
        times = [(event.key, event.self_device_time_total) for event in profiled.key_averages()]
    except Exception as error:
        print(f"not profiled: {error}", file=sys.stderr)
        return None
    ours = sum(time for key, time in times if any(kernel in key for kernel in OUR_KERNELS))
    return sum(time for _, time in times) / PROFILED / 1e6, ours / PROFILED / 1e6


def work() -> None:
    """Answer the requests of `measure`, one line each: a model, a run, and whether to profile it."""
    torch.set_num_threads(1)
    trainings: dict[tuple[str, str], Iterator[Any]] = {}
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder, chdir(folder):
        for line in sys.stdin:
            model, run, profiled = json.loads(line)
            if any(model != other for other, _ in trainings):  # The next model needs the memory.
                trainings.clear()
                gc.collect()
                torch.cuda.empty_cache()
            if (model, run) not in trainings:
                trainings[model, run] = make_steps(MODELS[model], run)
                time_turn(trainings[model, run], MODELS[model].steps)
            steps = trainings[model, run]
            answer = kernel_times(steps) if profiled else time_turn(steps, MODELS[model].steps)
            print(f"answer {json.dumps(answer)}", flush=True)
        trainings.clear()  # While the folder is there, because the runs end now.


# ---- all trees -------------------------------------------------------------------------------------------------------


class Worker:
    """A process that trains with one source tree."""

    def __init__(self, source: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(Path(source).resolve())}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.trained"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def ask(self, model: str, run: str, profiled: bool = False) -> Any:
        """Return the worker's answer; other lines that it prints are passed over."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([model, run, profiled]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise RuntimeError(f"the process of {model}: {run} has ended; its error is above")

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def source_trees() -> dict[str, str]:
    """Return the source folders to compare, by label; by default the one that is installed."""
    given = os.environ.get("BENCH_TREES", "")
    if given:
        return dict(tree.split("=", 1) for tree in given.split(","))
    return {"": str(Path(__file__).resolve().parent.parent / "src")}


def rows_of_model(model: str, workers: dict[str, Worker], rounds: int, only: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of one model, all trees and runs in alternation."""
    runs = [run for run in RUNS if run in (BARE, NONE) or wanted(run, only)]
    queued: dict[tuple[str, str], list[float]] = {}

    def turn(tree: str, run: str) -> float:
        seconds, until_queued = workers[tree].ask(model, run)
        queued.setdefault((tree, run), []).append(until_queued)
        return float(seconds)

    turns: dict[str, Callable[[], float]] = {
        f"{tree}/{run}": partial(turn, tree, run) for tree in workers for run in runs
    }
    seconds = in_turn(turns, rounds)
    for run in runs:
        for tree, worker in workers.items():
            own, bare, none = (seconds[f"{tree}/{other}"] for other in (run, BARE, NONE))
            more = median(value - base for value, base in zip(own, none, strict=True)) * 1e6
            kernels = worker.ask(model, run, True)
            in_ms = [f"{time * 1e3:.2f}" for time in kernels] if kernels else ["", ""]
            goal = GOALS.get(run, "") if model == "GPT-2 small" else ""
            label = f"{model}: {run}" + (f", {tree}" if tree else "")
            launched = f"{median(queued[tree, run]) * 1e3:.2f}"
            yield label, f"{median(own) * 1e3:.2f}", *above(own, bare), goal, f"{more:.0f}", *in_ms, launched


def measure(rounds: int, only: list[str]) -> Table:
    """Time every run of every tree; without a GPU, only those of the smallest model."""
    models = [name for name in MODELS if DEVICE == "cuda" or name == HOST]
    workers = {label: Worker(source) for label, source in source_trees().items()}
    rows: list[tuple[str, ...]] = []
    try:
        for model in models:
            rows += rows_of_model(model, workers, max(rounds // 40, 5), only)
            print("\n".join(map(str, rows[-len(RUNS) * len(workers) :])), flush=True)  # In case the time runs out.
    finally:
        for worker in workers.values():
            worker.close()
    return Table(f"{TITLE}, {DEVICE}", COLUMNS, rows, NOTES)


if __name__ == "__main__":
    work()
