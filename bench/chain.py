"""Measure what a chain of five update hooks costs, in passes over the gradients of GPT-2 small.

The unit is two reads and one write of all gradients: one `_foreach_norm` and one `_foreach_mul_`, which is what
clipping alone needs. The five hooks are centralize, scale (one block), measure, clip_norm and measure.
"""

from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from bench.gpt import GPT
from bench.interleave import standard_error_of_median
from bench.table import Table
from bench.turns import in_turn, wanted
from hookline import HookRegistry
from hookline.core.schedule import Reading
from hookline.gradients.chain import UpdateChain
from hookline.record.record import Record

TITLE = "A chain of update hooks over 124M parameters"
COLUMNS = ("what is done with the gradients", "time", "ratio", "± s.e.", "goal", "host alone", "device alone", "ratio")
SLEEP_CYCLES = 20_000_000  # about 10 ms
HOOKS: list[dict[str, Any]] = [
    {"name": "centralize"},
    {"name": "scale", "params": "blocks.0.*", "factor": 1.0},  # at 0.1 a thousand rounds would leave denormal numbers
    {"name": "measure", "as": "before_clip"},
    {"name": "clip_norm", "max_norm": 1.0},
    {"name": "measure", "as": "after_clip"},
]
NOTES = [
    "Ratio: the median over the rounds of (time / time of two reads and one write) in the same round.",
    "Host alone: the time until the last call returned; the device may still be busy.",
    "Device alone: one step whose launches were all queued before the device began. Its ratio is the ratio of the "
    "medians.",
    "Identity: the default hook alone, which is not called.",
    "By hand: the same five things in a loop over the parameters, with torch operations and without waits.",
    "Plus the same torch operations: the means, foreach operations and norms that the hooks use, called directly.",
    "On CUDA, a turn is a number of steps between two synchronizations.",
]


class Gradients:
    """A model's gradients, on which all contenders work in turn."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.model = GPT(768, 12).to(device, dtype)
        for param in self.model.parameters():
            param.grad = torch.randn_like(param)
        self.named = {name: param.grad for name, param in self.model.named_parameters() if param.grad is not None}
        self.all = list(self.named.values())
        self.first_block = [grad for name, grad in self.named.items() if name.startswith("blocks.0.")]

    def two_reads_and_one_write(self) -> None:
        """Compute the norms, and multiply by a factor."""
        torch._foreach_norm(self.all)
        torch._foreach_mul_(self.all, 1.0)

    def by_hand(self) -> list[Tensor]:
        """Do what the five hooks do, as one would write it without them."""
        for name, grad in self.named.items():
            if grad.dim() > 1:
                grad.sub_(grad.mean(dim=tuple(range(1, grad.dim())), keepdim=True))
            if name.startswith("blocks.0."):
                grad.mul_(1.0)
        before = torch.stack([grad.norm() for grad in self.all]).norm()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return [before, torch.stack([grad.norm() for grad in self.all]).norm()]

    def clip_by_torch(self) -> Tensor:
        """Do what clip_norm does, bit for bit."""
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def by_torch(self) -> list[Tensor]:
        """Do what the five hooks do with the torch operations that they use, and clip with torch's function."""
        matrices = [grad for grad in self.all if grad.dim() > 1]
        means = [torch.mean(matrix, dim=tuple(range(1, matrix.dim())), keepdim=True) for matrix in matrices]
        torch._foreach_sub_(matrices, means)
        torch._foreach_mul_(self.first_block, 1.0)
        before = torch.nn.utils.get_total_norm(self.all)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return [before, torch.nn.utils.get_total_norm(self.all)]

    def run(self, hooks: list[dict[str, Any]]) -> "Run":
        """Make a run with these hooks."""
        return Run(self.model, hooks)


class Run:
    """As much of a training run as a chain needs; what hooks log is copied as in any other."""

    epoch = 0

    def __init__(self, model: torch.nn.Module, hooks: list[dict[str, Any]]) -> None:
        params = dict(model.named_parameters())
        self.model, self.trainer, self.clock = model, self, Reading(epochs=1)
        self.registry = HookRegistry({"update": hooks})
        self.chain = UpdateChain(self.registry, params, model)
        self.record = Record.in_memory()

    @property
    def step(self) -> int:
        """The number of this step, which is also that of its only batch."""
        return self.clock.steps

    def update(self) -> None:
        """Do what the training loop does with the chain at each step."""
        self.clock.steps += 1
        self.clock.batches += 1
        self.registry.begin_batch(self.clock)
        if on_update := self.registry.slots.on_update:
            on_update(self)

    def log(self, name: str, value: Any) -> None:
        """Record a value of this step; flushed every 50 steps, as often as a run may do so."""
        self.record.log(self.step, self.epoch, name, value)
        if self.step % 50 == 0:
            self.record.flush()

    def set_clipped_norm(self, norm: Tensor, is_global: bool) -> None:
        """Ignore that gradients were clipped."""


def contenders(gradients: Gradients) -> dict[str, Callable[[], object]]:
    """Return what is timed, by name; the unit comes first."""
    identity = [{"name": "identity"}]
    disabled = [{"name": "clip_norm", "max_norm": 1.0, "enabled": False}]
    return {
        "two reads and one write": gradients.two_reads_and_one_write,
        "five hooks by hand": gradients.by_hand,
        "clip_grad_norm_ plus the same torch operations": gradients.by_torch,
        "five hooks, Hookline": gradients.run(HOOKS).update,
        "torch's clip_grad_norm_": gradients.clip_by_torch,
        "clip_norm alone, Hookline": gradients.run([HOOKS[3]]).update,
        "identity, Hookline": gradients.run(identity).update,
        "disabled, Hookline": gradients.run(disabled).update,
    }


class Turn:
    """Some steps of one contender, with the time that the host alone and the device alone were busy."""

    def __init__(self, call: Callable[[], object], device: str, steps: int) -> None:
        self.call, self.device, self.steps = call, device, steps
        self.host: list[float] = []
        self.alone: list[float] = []

    def __call__(self) -> float:
        """Return the seconds of a step, after one that is not timed."""
        self.call()
        self._synchronize()
        began = perf_counter()
        for _ in range(self.steps):
            self.call()
        self.host.append((perf_counter() - began) / self.steps)
        self._synchronize()
        seconds = (perf_counter() - began) / self.steps
        if self.device == "cuda":
            self.alone.append(seconds_on_device(self.call))
        return seconds

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def seconds_on_device(call: Callable[[], object]) -> float:
    """Return what the device alone needs: it sleeps until the host has queued everything."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    began.record()
    call()
    ended.record()
    torch.cuda.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


def rows(device: str, dtype: torch.dtype, rounds: int, only: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield one row for each contender."""
    gradients, kind = Gradients(device, dtype), str(dtype).removeprefix("torch.")
    calls = contenders(gradients)
    first = next(iter(calls))
    turns = {
        name: Turn(call, device, 10 if device == "cuda" else 1)
        for name, call in calls.items()
        if name == first or wanted(f"{kind}: {name}", only)
    }
    seconds = in_turn(turns, rounds)
    for name, values in seconds.items():
        host = f"{median(turns[name].host) * 1e3:.3f} ms"
        alone = device_alone(turns[name], turns[first])
        yield f"{kind}: {name}", *timing(values, seconds[first]), goal_of(name, device), host, *alone


def timing(values: list[float], baseline: list[float]) -> tuple[str, str, str]:
    """Return the median, that of the paired ratios, and its standard error."""
    ratios = [value / base for value, base in zip(values, baseline, strict=True)]
    return f"{median(values) * 1e3:.3f} ms", f"{median(ratios):.2f} x", f"{standard_error_of_median(ratios):.2f}"


def goal_of(name: str, device: str) -> str:
    """Return the largest ratio that is accepted; empty if there is none."""
    if name.startswith("five hooks, Hookline"):
        return "≤ 3.00 x" if device == "cuda" else ""  # and below the row before it
    return "≤ 0.01 x" if name.startswith(("identity", "disabled")) else ""


def device_alone(turn: Turn, first: Turn) -> tuple[str, str]:
    """Return the median of the device's time and its ratio to the first contender's; empty without a device."""
    if not turn.alone:
        return "", ""
    return f"{median(turn.alone) * 1e3:.3f} ms", f"{median(turn.alone) / median(first.alone):.2f} x"


def measure(rounds: int, only: list[str]) -> Table:
    """Return the table for this machine's device; `only` keeps the rows whose name contains one of its words."""
    if torch.cuda.is_available():
        kinds = (torch.float32, torch.bfloat16)
        table = [row for dtype in kinds for row in rows("cuda", dtype, max(rounds // 20, 5), only)]
        return Table(f"{TITLE}, {torch.cuda.get_device_name()}", COLUMNS, table, NOTES)
    torch.set_num_threads(1)
    return Table(f"{TITLE}, CPU", COLUMNS, list(rows("cpu", torch.float32, max(rounds // 200, 3), only)), NOTES)
