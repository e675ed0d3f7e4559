"""Measure what statistics of every leaf module's output and of every gradient cost, at every step.

With a CUDA device the step of a GPT is timed without statistics, and with each way of computing them in turn. Without
one, tensors are timed against a loop over them that computes each statistic with a torch operation.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from bench.gpt import GPT
from bench.interleave import standard_error_of_median
from bench.table import Table
from bench.turns import above, in_turn, seconds_of, wanted
from bench.watched import Plain, Recorder, Training
from bench.watchers import (
    DeferredOutputs,
    NaiveGradients,
    NaiveOutputs,
    OurGradients,
    OurHistograms,
    OurMonitor,
    OurOutputs,
    naive,
)
from hookline.record import Record
from hookline.stats.rows import summarize

TITLE = "Statistics of activations and gradients"
COLUMNS = ("what is measured, and how", "time", "above or ratio", "± s.e.", "goal", "peak memory", "in no_grad")
GPU_NOTES = [
    "Six statistics: mean, std, absmax, zeros, NaNs, infinities; Hookline computes ten. Every leaf module, every step.",
    "Pure bf16, batch 8 x 1024, fused AdamW. A turn is a number of steps between two synchronizations.",
    "Above: median over the rounds of (step / plain step - 1) in the same round.",
    "Hookline's time includes the copy to the host and reading what has arrived. With the record: the monitoring "
    "hook, whose rows end up in layers.jsonl, written every ten steps (by the training loop every 47).",
    "Peak memory: that of a training step, and of an evaluation without gradients, above that of the plain one.",
]
MODELS = (("GPT-2 small", 768, 12, "≤ +5 %", 10), ("width 2048", 2048, 16, "≤ +3 %", 4))
CPU_NOTES = [
    "One torch thread. A read is tensor.sum(). The naive way is six torch operations for each tensor, each of which "
    "is read with item().",
    "Ratio: median over the rounds of (time / its baseline's time) in the same round.",
]


def measure(rounds: int, only: list[str]) -> Table:
    """Return the table for this machine's device; `only` keeps the rows whose name contains one of its words."""
    if torch.cuda.is_available():
        return Table(f"{TITLE}, {torch.cuda.get_device_name()}", COLUMNS, list(on_gpu(rounds, only)), GPU_NOTES)
    return Table(f"{TITLE}, CPU", COLUMNS, list(on_cpu(rounds, only)), CPU_NOTES)


def gpu_watchers(goal: str, recorder: Recorder) -> dict[str, Plain]:
    """Return what is timed on a GPU, by name; the plain step comes first."""
    return {
        "plain step": Plain(),
        "outputs, naive with item()": NaiveOutputs(),
        "outputs, deferred torch operations": DeferredOutputs(),
        "outputs, Hookline": OurOutputs(goal),
        "outputs with the record, Hookline": OurMonitor(recorder, goal),
        "outputs, Hookline without a limit": OurOutputs(limit_bytes=1 << 62),
        "gradients, naive with item()": NaiveGradients(),
        "gradients, Hookline": OurGradients(),
        "gradients with percentiles, Hookline": OurHistograms(),
    }


def on_gpu(rounds: int, only: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of both models."""
    for title, width, heads, goal, steps in MODELS:
        with TemporaryDirectory() as root:
            yield from rows_of_model(title, Training(width, heads), goal, steps, root, rounds, only)
        torch.cuda.empty_cache()


def rows_of_model(
    title: str, training: Training, goal: str, steps: int, root: str, rounds: int, only: list[str]
) -> Iterator[tuple[str, ...]]:
    """Yield one row per watcher, timed in turn."""
    record = Record.on_disk(root, config={}, seed=None)
    known, plain = gpu_watchers(goal, Recorder(training.model, record)), "plain step"
    watchers = {name: who for name, who in known.items() if wanted(f"{title}: {name}", only) or name == plain}
    runs = {name: partial(training.seconds, who, steps) for name, who in watchers.items()}
    seconds = in_turn(runs, max(rounds // 100, 3))
    train = {name: training.peak(who, training.step) for name, who in watchers.items()}
    evaluate = {name: training.peak(who, training.evaluate) for name, who in watchers.items()}
    record.close("completed", None, [], [], {})
    for name, who in watchers.items():
        timing = above(seconds[name], seconds[plain])
        memory = [f"{peaks[name] / peaks[plain] - 1:+.1%}" for peaks in (train, evaluate)]
        yield f"{title}: {name}", f"{median(seconds[name]) * 1e3:.2f} ms", *timing, who.goal, *memory


def on_cpu(rounds: int, only: list[str]) -> Iterator[tuple[str, ...]]:
    """Compare single large tensors and lists of parameters with a loop over them."""
    torch.set_num_threads(1)
    for dtype, megabytes in ((torch.float32, 4), (torch.float32, 64), (torch.bfloat16, 4), (torch.bfloat16, 64)):
        name = f"{megabytes} MB of {str(dtype).removeprefix('torch.')}"
        if wanted(name, only):
            yield from large_tensor(name, torch.randn(megabytes * 2**20 // dtype.itemsize).to(dtype), rounds)
    several = {
        "8 parameters of 1M": [torch.randn(2**20) for _ in range(8)],
        "50 parameters of a GPT": list(map(torch.randn_like, GPT(64, 4, layers=4, vocabulary=1000).parameters())),
        **{f"500 parameters of {size}": [torch.randn(size) for _ in range(500)] for size in (64, 1024, 4096)},
    }
    for name, parameters in several.items():
        if wanted(name, only):
            yield from many_parameters(name, parameters, rounds)


def large_tensor(name: str, tensor: Tensor, rounds: int) -> Iterator[tuple[str, ...]]:
    """Time the naive way, one read and ours."""
    calls: Mapping[str, Callable[[], object]] = {
        "naive": partial(naive, tensor),
        "one read": tensor.sum,
        "Hookline": partial(summarize, [tensor]),
    }
    yield from ratios(name, calls, rounds, "≤ 0.33 x")


def many_parameters(name: str, parameters: list[Tensor], rounds: int) -> Iterator[tuple[str, ...]]:
    """Time a loop over the parameters, and ours."""
    calls: dict[str, Callable[[], object]] = {
        "naive": lambda: [naive(parameter) for parameter in parameters],
        "Hookline": lambda: summarize(parameters),
    }
    yield from ratios(name, calls, rounds, "≤ 0.33 x")


def ratios(name: str, calls: Mapping[str, Callable[[], object]], rounds: int, goal: str) -> Iterator[tuple[str, ...]]:
    """Yield one row per call, as multiples of the first."""
    seconds = in_turn({key: partial(seconds_of, call) for key, call in calls.items()}, max(rounds // 50, 5))
    first = next(iter(seconds.values()))
    for key, values in seconds.items():
        paired = [value / base for value, base in zip(values, first, strict=True)]
        timing = f"{median(values) * 1e3:.2f} ms", f"{median(paired):.2f} x", f"{standard_error_of_median(paired):.2f}"
        yield f"{name}: {key}", *timing, goal if key == "Hookline" else "", "", ""
