"""What a chain of five update hooks costs, in passes over the gradients of GPT-2 small.

The measure is two reads and one write of all gradients: one `_foreach_norm` and one `_foreach_mul_`, which is what
clipping alone needs. The five links are centralize, scale (one block), measure, clip_norm and measure.
"""

from collections.abc import Callable, Iterator, Mapping
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from bench.gpt import GPT
from bench.interleave import standard_error_of_median
from bench.table import Table
from bench.turns import in_turn, wanted
from hookline.core.registry import HookRegistry
from hookline.gradients.chain import UpdateChain
from hookline.record.metrics import MetricBuffer

TITLE = "A chain of update hooks over 124M parameters"
COLUMNS = ("what is done with the gradients", "time", "ratio", "± s.e.", "goal", "host alone", "device alone", "ratio")
SLEEP_CYCLES = 20_000_000  # about 10 ms
LINKS: list[dict[str, Any]] = [
    {"name": "centralize"},
    {"name": "scale", "params": "blocks.0.*", "factor": 1.0},  # at 0.1 a thousand rounds would leave denormal numbers
    {"name": "measure", "as": "before_clip"},
    {"name": "clip_norm", "max_norm": 1.0},
    {"name": "measure", "as": "after_clip"},
]
NOTES = [
    "Ratio: median over the rounds of (time / that of two reads and one write) in the same round.",
    "Host alone: until the last call returned; the device may still be at work.",
    "Device alone: one step whose launches were all queued before the device began. Its ratio is that of the medians.",
    "By hand: the same five things in a loop over the parameters, with torch operations and without waits.",
    "On CUDA a turn is some steps between two synchronisations; logged values are not written.",
]


class Gradients:
    """A model's gradients, which everybody works on in turn."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.model = GPT(768, 12).to(device, dtype)
        for param in self.model.parameters():
            param.grad = torch.randn_like(param)
        self.named = {name: param.grad for name, param in self.model.named_parameters() if param.grad is not None}
        self.all = list(self.named.values())

    def two_reads_and_one_write(self) -> None:
        """A norm, and a factor."""
        torch._foreach_norm(self.all)
        torch._foreach_mul_(self.all, 1.0)

    def by_hand(self) -> list[Tensor]:
        """The five links as one writes them."""
        for name, grad in self.named.items():
            if grad.dim() > 1:
                grad.sub_(grad.mean(dim=tuple(range(1, grad.dim())), keepdim=True))
            if name.startswith("blocks.0."):
                grad.mul_(1.0)
        before = torch.stack([grad.norm() for grad in self.all]).norm()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return [before, torch.stack([grad.norm() for grad in self.all]).norm()]

    def clip_by_torch(self) -> Tensor:
        """What clip_norm does, bit for bit."""
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def run(self, links: list[dict[str, Any]]) -> "Run":
        """A run with these links."""
        return Run(self.model, links)


class Run:
    """As much of a training run as a chain needs; what links log is snapshotted as in any other."""

    epoch = 0

    def __init__(self, model: torch.nn.Module, links: list[dict[str, Any]]) -> None:
        params = dict(model.named_parameters())
        self.step, self.model, self.trainer = 0, model, self
        self.registry = HookRegistry({"update": links})
        self.chain = UpdateChain(self.registry, lambda: params, model)
        self.record = MetricBuffer(Nowhere())

    def update(self) -> None:
        """What the training loop does with the chain at each step."""
        if heard := self.registry.slots.on_update:
            self.step += 1
            heard(self)

    def log(self, name: str, value: Any) -> None:
        """Record a value of this step; they are forgotten now and then, as a flush would."""
        self.record.log(self.step, self.epoch, name, value)
        if self.step % 50 == 0:
            self.record = MetricBuffer(Nowhere())

    def clipped(self, norm: Tensor, is_global: bool) -> None:
        """Hear of a clipping."""


class Nowhere:
    """Takes records and drops them."""

    def write(self, record: Mapping[str, Any], /) -> None:
        """Do nothing."""


def contenders(gradients: Gradients) -> dict[str, Callable[[], object]]:
    """Everybody who is timed; the measure of all first."""
    identity = [{"name": "identity"}]
    disabled = [{"name": "clip_norm", "max_norm": 1.0, "enabled": False}]
    return {
        "two reads and one write": gradients.two_reads_and_one_write,
        "five links by hand": gradients.by_hand,
        "five links, Hookline": gradients.run(LINKS).update,
        "torch's clip_grad_norm_": gradients.clip_by_torch,
        "clip_norm alone, Hookline": gradients.run([LINKS[3]]).update,
        "identity, Hookline": gradients.run(identity).update,
        "disabled, Hookline": gradients.run(disabled).update,
    }


class Turn:
    """Some steps of one contender; notes how long the host alone was at work, and the device alone."""

    def __init__(self, call: Callable[[], object], device: str, steps: int) -> None:
        self.call, self.device, self.steps = call, device, steps
        self.host: list[float] = []
        self.alone: list[float] = []

    def __call__(self) -> float:
        """Seconds of a step, after one that is not timed."""
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
    """What the device alone needs: it sleeps until the host has queued everything."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    began.record()
    call()
    ended.record()
    torch.cuda.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


def rows(device: str, dtype: torch.dtype, rounds: int, only: list[str]) -> Iterator[tuple[str, ...]]:
    """One row for each contender."""
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
    """The median, that of the paired ratios, and its standard error."""
    ratios = [value / base for value, base in zip(values, baseline, strict=True)]
    return f"{median(values) * 1e3:.3f} ms", f"{median(ratios):.2f} x", f"{standard_error_of_median(ratios):.2f}"


def goal_of(name: str, device: str) -> str:
    """What was promised."""
    if name.startswith("five links, Hookline"):
        return "≤ 1.50 x" if device == "cuda" else ""
    return "≤ 0.01 x" if name.startswith(("identity", "disabled")) else ""


def device_alone(turn: Turn, first: Turn) -> tuple[str, str]:
    """The median of the device's own time, and how many times the first one's it is; nothing without a device."""
    if not turn.alone:
        return "", ""
    return f"{median(turn.alone) * 1e3:.3f} ms", f"{median(turn.alone) / median(first.alone):.2f} x"


def measure(rounds: int, only: list[str]) -> Table:
    """The table for the device at hand; `only` keeps the rows whose name contains one of its words."""
    if torch.cuda.is_available():
        kinds = (torch.float32, torch.bfloat16)
        table = [row for dtype in kinds for row in rows("cuda", dtype, max(rounds // 20, 5), only)]
        return Table(f"{TITLE}, {torch.cuda.get_device_name()}", COLUMNS, table, NOTES)
    torch.set_num_threads(1)
    return Table(f"{TITLE}, CPU", COLUMNS, list(rows("cpu", torch.float32, max(rounds // 200, 3), only)), NOTES)
