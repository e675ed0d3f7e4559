"""Measure what a monitor on every leaf module costs a compiled training step on a GPU: time, memory, graphs."""

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._dynamo import config
from torch._dynamo.utils import counters

from bench.gpt import GPT
from bench.table import Table
from bench.turns import above, in_turn, seconds_of
from bench.watched import Plain, Training
from hookline import HookManager
from hookline.activations.monitor import Monitor

TITLE = "Statistics of activations in a compiled model"
COLUMNS = (
    "compiled step", "time", "above plain", "± s.e.", "goal", "peak memory", "graphs", "modules counted", "compiled in",
)  # fmt: skip
NOTES = [
    "GPT-2 small, bf16, batch 8 x 1024, fused AdamW, torch.compile with its defaults; each of the 75 leaf modules.",
    "Six statistics: mean, std, absmax, zeros, NaNs, infinities. A turn is a number of steps between two "
    "synchronizations.",
    "Above: median over the rounds of (step / plain step - 1) in the same round.",
    "Compiled in: the time until the whole first step is queued, in a process that has compiled before, with an empty "
    "cache.",
    "Traced: the same six as torch operations in torch hooks, which become part of the graph.",
    "An operator per module: the graph calls the monitor's hook, as it does for hooks that need more than statistics.",
]
STEPS = 10
IN_GRAPH, BY_OPERATOR = "Hookline", "Hookline, an operator per module"
GOALS = {IN_GRAPH: "≤ +7 %", BY_OPERATOR: "≤ +10 %"}


class Compiled(Training):
    """A compiled GPT-2 small in training, whose code no other model shares, so that its guards are its own."""

    def __init__(self, watch: Callable[[nn.Module], Any] | None = None) -> None:
        counters.clear()
        super().__init__(768, 12)
        self.model.__class__ = _class_with_separate_code()
        self.watched = watch(self.model) if watch is not None else None
        self.model: Any = torch.compile(self.model)
        with config.patch(skip_nnmodule_hook_guards=watch is None):  # the plain one as where Hookline has never been
            self.compiled_in = seconds_of(partial(self.step, Plain()))
        for _ in range(2):
            self.step(Plain())
        self.graphs = int(counters["stats"]["unique_graphs"])


def _class_with_separate_code() -> type[GPT]:
    forward = GPT.forward
    return type("GPT", (GPT,), {"forward": FunctionType(forward.__code__.replace(), forward.__globals__, "forward")})


class Traced:
    """Torch operations that become part of the graph."""

    def __init__(self, model: nn.Module) -> None:
        leaves = [module for module in model.modules() if not list(module.children())]
        self.rows = torch.zeros(len(leaves), 6, device="cuda")
        for row, module in zip(self.rows.unbind(), leaves, strict=True):
            module.register_forward_hook(partial(self._note, row))

    @staticmethod
    def _note(row: torch.Tensor, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        wide = output.detach().float()
        std, mean = torch.std_mean(wide)
        counts = ((wide == 0).sum(), wide.isnan().sum(), wide.isinf().sum())
        row.copy_(torch.stack([mean, std, wide.abs().amax(), *counts]))


class Ours:
    """A monitor, as a user registers it; without `in_graph` its hook is called by an operator at each module."""

    def __init__(self, model: nn.Module, in_graph: bool = True) -> None:
        self.manager = HookManager()
        self.manager.watch(model)
        monitor = Monitor(lambda name, module: not list(module.children()))
        monitor.statistics_only = in_graph
        self.manager.register(monitor, "monitor")


class Monitored(Compiled):
    """A compiled model whose monitor is called at the end of each step, as by a trainer."""

    def step(self, watcher: Plain) -> None:
        """Run the same step, then take what has arrived."""
        manager = self.watched.manager
        manager.dispatcher.run.step = self.steps_made + 1
        super().step(watcher)
        manager.get("monitor").on_step_end(self.steps_made)

    def counted(self) -> int:
        """Return at how many modules the monitor fired in every step."""
        return sum(row.fired == self.steps_made for row in self.watched.manager.fire_report().rows)


def rows(rounds: int, only: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield a row for the plain step and for each way to watch; `only` keeps names that contain one of its words."""
    torch.compile(torch.square)(torch.ones(8, device="cuda"))
    makers = {
        "traced": partial(Compiled, Traced),
        IN_GRAPH: partial(Monitored, Ours),
        BY_OPERATOR: partial(Monitored, partial(Ours, in_graph=False)),
    }
    wanted = [name for name in makers if not only or any(word.lower() in name.lower() for word in only)]
    watched = {name: makers[name]() for name in wanted}
    trainings = {"plain": Compiled(), **watched}  # made last: the first forward hook has compiled code forgotten
    plain = Plain()
    turns = {name: partial(training.seconds, plain, STEPS) for name, training in trainings.items()}
    seconds = in_turn(turns, max(rounds // 40, 5))
    peaks = {name: training.peak(plain, training.step) for name, training in trainings.items()}
    for name, training in trainings.items():
        timing = above(seconds[name], seconds["plain"])
        memory = f"{peaks[name] / peaks['plain'] - 1:+.1%}"
        counted = str(training.counted()) if isinstance(training, Monitored) else ""
        seen = str(training.graphs), counted, f"{training.compiled_in:.0f} s"
        goal = GOALS.get(name, "")
        yield name, f"{median(seconds[name]) * 1e3:.2f} ms", *timing, goal, memory, *seen


def measure(rounds: int, only: list[str]) -> Table:
    """Make the table, if there is a GPU."""
    if not torch.cuda.is_available():
        return Table(TITLE, COLUMNS, [], [*NOTES, "Not measured: there is no CUDA device."])
    return Table(TITLE, COLUMNS, list(rows(rounds, only)), NOTES)
