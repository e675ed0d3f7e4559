"""Measure what the gradient monitor costs if it measures every parameter at every step, including the record.

With a CUDA device the step of a GPT is timed alone and with each way of measuring its gradients. Without one, the norms
of 500 small parameters are timed against a loop that copies each to the host with `item()`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from bench.interleave import standard_error_of_median
from bench.statistics import MODELS
from bench.table import Table
from bench.turns import above, in_turn, seconds_of, wanted
from bench.watched import FLUSH_STEPS, Plain, Training
from bench.watched import Recorder as ModelRecorder
from hookline import GradientMonitor, HookManager
from hookline.record import Record
from hookline.stats.rows import norms

TITLE = "The gradient monitor, every parameter at every step"
COLUMNS = ("what is measured, and how", "time", "above or ratio", "± s.e.", "goal")
GPU_NOTES = [
    "Pure bf16, batch 8 x 1024, fused AdamW. An interval is a number of steps between two synchronizations.",
    "Above: median over the rounds of (step / plain step - 1) in the same round.",
    "Hookline's rows end up on disk, in metrics.jsonl and layers.jsonl, written every ten steps (by the training loop "
    "every 47).",
]
CPU_NOTES = [
    "One torch thread. Ratio: median over the rounds of (time / the loop's time) in the same round.",
    "A whole step: norms before and after the chain, the verdict on every layer, and the record in memory.",
]


class Recorder(ModelRecorder):
    """Stands for a trainer that has no hooks but the monitor."""

    hooks = HookManager()


class Monitored(Plain):
    """Calls the monitor's events as the loop does."""

    def __init__(self, training: Training, recorder: Recorder, goal: str = "", **parameters: Any) -> None:
        self.goal = goal
        self.optimizer, self.recorder = training.optimizer, recorder
        self.monitor = GradientMonitor(log_frequency=1, **parameters)

    def after_backward(self, step: int, gradients: list[Tensor]) -> None:
        """Call the events between backward and step; the gradients do not change in between."""
        self.step = step
        self.monitor.on_gradients_ready(self.recorder, step)
        self.monitor.on_before_optimizer_step(self.optimizer)

    def after_step(self, *_: Any) -> None:
        """Call the events after the optimizer step."""
        if self.monitor.on_after_optimizer_step is not None:
            self.monitor.on_after_optimizer_step()
        self.monitor.on_step_end(self.recorder)
        if self.step % FLUSH_STEPS == 0:
            self.recorder.record.flush()

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Listen to the optimizer's steps inside the block."""
        handle = self.optimizer.register_step_post_hook(self.after_step)
        yield
        handle.remove()


class NaiveNorms(Plain):
    """Copies each norm to the host at once."""

    def after_backward(self, step: int, gradients: list[Tensor]) -> None:
        """Wait for the device once per parameter."""
        self.seen = naive_norms(gradients)


class DeferredNorms(Plain):
    """Computes all norms in one call and leaves them on the device."""

    def after_backward(self, step: int, gradients: list[Tensor]) -> None:
        """Compute them in float32, because a norm in half precision would be wrong."""
        self.seen = torch._foreach_norm(gradients, 2, dtype=torch.float32)


def naive_norms(gradients: list[Tensor]) -> list[float]:
    """Return the norms by the obvious loop."""
    return [gradient.norm().item() for gradient in gradients]


def gpu_watchers(training: Training, recorder: Recorder) -> dict[str, Plain]:
    """Return what is timed on a GPU, the plain step first."""
    monitored = partial(Monitored, training, recorder)
    all_of_it = {"percentiles": [10, 50, 90], "log_histogram": True}
    return {
        "plain step": Plain(),
        "norms, naive with item()": NaiveNorms(),
        "norms, _foreach_norm alone": DeferredNorms(),
        "norms, Hookline": monitored("≤ +1 %", log_moments=False),
        "norms and moments, Hookline": monitored("≤ +1.5 %"),
        "percentiles too, Hookline": monitored("≤ +4 %", percentiles=[10, 50, 90]),
        "histograms and percentiles, Hookline": monitored("≤ +4 %", **all_of_it),
        "the same, one bin per octave, Hookline": monitored("≤ +4 %", **all_of_it, bins_per_octave=1),
        "update ratio too, Hookline": monitored(log_update_ratio=True),
    }


def on_gpu(rounds: int, only: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of both models."""
    for title, width, heads, _, steps in MODELS:
        with TemporaryDirectory() as root:
            yield from rows_of_model(title, Training(width, heads), steps, root, rounds, only)
        torch.cuda.empty_cache()


def rows_of_model(
    title: str, training: Training, steps: int, root: str, rounds: int, only: list[str]
) -> Iterator[tuple[str, ...]]:
    """Yield one row per way of measuring, all timed alternately."""
    record = Record.on_disk(root, config={}, seed=None)
    contenders = gpu_watchers(training, Recorder(training.model, record))
    plain = "plain step"
    watchers = {name: who for name, who in contenders.items() if wanted(f"{title}: {name}", only) or name == plain}
    runs = {name: partial(training.seconds, who, steps) for name, who in watchers.items()}
    seconds = in_turn(runs, max(rounds // 60, 5))
    record.close("completed", None, [], [], {})
    for name, who in watchers.items():
        timing = above(seconds[name], seconds[plain])
        yield f"{title}: {name}", f"{median(seconds[name]) * 1e3:.2f} ms", *timing, who.goal


def on_cpu(rounds: int, only: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of 500 parameters of several sizes."""
    torch.set_num_threads(1)
    for size in (64, 256, 1024, 4096):
        name = f"500 parameters of {size}"
        if wanted(name, only):
            yield from rows_of_size(name, size, rounds)


def rows_of_size(name: str, size: int, rounds: int) -> Iterator[tuple[str, ...]]:
    """Yield one row per way to get the norms, relative to the loop."""
    model = nn.ParameterList([torch.randn(size) for _ in range(500)])
    gradients = [torch.randn(size) for _ in range(500)]
    for parameter, gradient in zip(model, gradients, strict=True):
        parameter.grad = gradient
    whole = partial(whole_step, GradientMonitor(1, log_moments=False), Recorder(model, Record.in_memory(keep=200)))
    calls: Mapping[str, Callable[[], object]] = {
        "naive loop with item()": partial(naive_norms, gradients),
        "_foreach_norm": lambda: torch.stack(torch._foreach_norm(gradients)).tolist(),
        "norms, Hookline": partial(norms, gradients),
        "a whole step, Hookline": whole,
    }
    goals = {"norms, Hookline": "≤ 0.5 x"}
    seconds = in_turn({key: partial(seconds_of, call) for key, call in calls.items()}, max(rounds // 10, 10))
    first = next(iter(seconds.values()))
    for key, values in seconds.items():
        paired = [value / base for value, base in zip(values, first, strict=True)]
        timing = f"{median(values) * 1e3:.2f} ms", f"{median(paired):.2f} x", f"{standard_error_of_median(paired):.2f}"
        yield f"{name}: {key}", *timing, goals.get(key, "")


def whole_step(monitor: GradientMonitor, recorder: Recorder) -> None:
    """Do all that the hook does in a step that is due."""
    monitor.on_gradients_ready(recorder, 1)
    monitor.on_before_optimizer_step(None)
    monitor.on_step_end(recorder)


def measure(rounds: int, only: list[str]) -> Table:
    """Return the table of the available device; `only` keeps rows whose name contains one of its words."""
    if torch.cuda.is_available():
        return Table(f"{TITLE}, {torch.cuda.get_device_name()}", COLUMNS, list(on_gpu(rounds, only)), GPU_NOTES)
    return Table(f"{TITLE}, CPU", COLUMNS, list(on_cpu(rounds, only)), CPU_NOTES)
