"""A GPT in training on the GPU, one step at a call, that somebody watches."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.gpt import GPT, VOCABULARY
from hookline.record.record import Record

FLUSH_STEPS = 10
Hook = Callable[[nn.Module, Any, Tensor], None]


class Plain:
    """Nobody watches; the others are variations of this."""

    goal = ""

    def hook(self, name: str) -> Hook | None:
        """The forward hook of one leaf module, if this one looks at outputs."""
        return None

    def after_forward(self, step: int) -> None:
        """Hear that the forward pass is over."""

    def after_backward(self, step: int, gradients: list[Tensor]) -> None:
        """Get the gradients."""

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Keep the hooks on the leaf modules for a while."""
        leaves = [(name, module) for name, module in model.named_modules() if is_leaf(name, module)]
        hooks = [(module, hook) for name, module in leaves if (hook := self.hook(name))]
        handles = [module.register_forward_hook(hook) for module, hook in hooks]
        yield
        for handle in handles:
            handle.remove()


def is_leaf(name: str, module: nn.Module) -> bool:
    """Whether there is no module inside."""
    return not list(module.children())


class Recorder:
    """Stands for the trainer: a model, and a record to write to."""

    def __init__(self, model: nn.Module, record: Record) -> None:
        self.model, self.record = model, record
        self.params = dict(model.named_parameters())

    def log(self, name: str, value: float, step: int) -> None:
        """A number of the run."""
        self.record.log(step, 0, name, value)

    def log_layers(self, series: str, names: Sequence[str], columns: Sequence[str], values: Tensor, step: int) -> None:
        """Numbers of every layer."""
        self.record.log_layers(series, step, names, columns, values)


class Training:
    """A model in training on the GPU, one step at a call."""

    def __init__(self, width: int, heads: int, batch: int = 8, length: int = 1024) -> None:
        torch.manual_seed(0)
        self.model = GPT(width, heads, length=length).to("cuda", torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(VOCABULARY, (batch, length + 1), device="cuda")
        self.steps_made = 0

    def step(self, watcher: Plain) -> None:
        """Forward, loss, backward, optimizer."""
        self.steps_made += 1
        logits = self.model(self.tokens[:, :-1])
        watcher.after_forward(self.steps_made)
        loss = functional.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        watcher.after_backward(self.steps_made, gradients)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def evaluate(self, watcher: Plain) -> None:
        """A forward pass without gradients."""
        with torch.no_grad():
            self.model(self.tokens[:, :-1])
            watcher.after_forward(0)

    def seconds(self, watcher: Plain, steps: int) -> float:
        """Seconds per step, over some steps between two synchronisations, after two that are not timed."""
        with watcher.watching(self.model):
            for _ in range(2):
                self.step(watcher)
            torch.cuda.synchronize()
            began = perf_counter()
            for _ in range(steps):
                self.step(watcher)
            torch.cuda.synchronize()
            return (perf_counter() - began) / steps

    def peak(self, watcher: Plain, run: Callable[[Plain], None]) -> int:
        """The most bytes allocated at once."""
        with watcher.watching(self.model):
            run(watcher)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            run(watcher)
            torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
