"""Train a GPT on the GPU, one step per call, with or without something that watches it."""

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
    """Watches nothing; the other ways of watching are variations of this."""

    goal = ""

    def hook(self, name: str) -> Hook | None:
        """Return the forward hook of one leaf module, None if outputs are not watched."""
        return None

    def after_forward(self, step: int) -> None:
        """Handle the end of the forward pass."""

    def after_backward(self, step: int, gradients: list[Tensor]) -> None:
        """Handle the gradients of the step."""

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Keep the hooks on the leaf modules inside the block."""
        leaves = [(name, module) for name, module in model.named_modules() if is_leaf(name, module)]
        hooks = [(module, hook) for name, module in leaves if (hook := self.hook(name))]
        handles = [module.register_forward_hook(hook) for module, hook in hooks]
        yield
        for handle in handles:
            handle.remove()


def is_leaf(name: str, module: nn.Module) -> bool:
    """Return whether a module has no children."""
    return not list(module.children())


class Recorder:
    """Stands for the trainer: a model, and a record to write to."""

    def __init__(self, model: nn.Module, record: Record) -> None:
        self.model, self.record = model, record
        self.params = dict(model.named_parameters())

    def log(self, name: str, value: float, step: int) -> None:
        """Record a number of the run."""
        self.record.log(step, 0, name, value)

    def log_layers(self, series: str, names: Sequence[str], columns: Sequence[str], values: Tensor, step: int) -> None:
        """Record numbers of every layer."""
        self.record.log_layers(series, step, names, columns, values)


class Training:
    """A model in training on the GPU, one step per call."""

    def __init__(self, width: int, heads: int, batch: int = 8, length: int = 1024) -> None:
        torch.manual_seed(0)
        self.model = GPT(width, heads, length=length).to("cuda", torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(VOCABULARY, (batch, length + 1), device="cuda")
        self.steps_made = 0

    def step(self, watcher: Plain) -> None:
        """Run forward, loss, backward and optimizer."""
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
        """Run a forward pass without gradients."""
        with torch.no_grad():
            self.model(self.tokens[:, :-1])
            watcher.after_forward(0)

    def seconds(self, watcher: Plain, steps: int) -> float:
        """Return the seconds per step, over some steps between two synchronizations, after two that are not timed."""
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
        """Return the most bytes allocated at once."""
        with watcher.watching(self.model):
            run(watcher)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            run(watcher)
            torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
