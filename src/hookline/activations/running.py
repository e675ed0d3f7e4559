"""Which module of a model runs now."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


class Running:
    """The modules of a model that are running, outermost first, for each thread on its own."""

    def __init__(self) -> None:
        self.entered = 0  # modules that began to run, in all threads
        self._local = threading.local()

    @property
    def innermost(self) -> torch.nn.Module | None:
        """The module that this thread is in; None outside of the model, and in passes that backward repeats."""
        stack = self._stack
        return stack[-1] if stack and not _in_backward() else None

    @contextmanager
    def following(self, model: torch.nn.Module) -> Iterator[None]:
        """Follow the model's modules for as long as the block lasts; it carries two torch hooks on each of them."""
        with ExitStack() as attached:
            for module in model.modules():
                attached.callback(module.register_forward_pre_hook(self._enter, prepend=True).remove)
                attached.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            yield

    @property
    def _stack(self) -> list[torch.nn.Module]:
        stack: list[torch.nn.Module] = self._local.__dict__.setdefault("stack", [])
        return stack

    def _enter(self, module: torch.nn.Module, inputs: Any) -> None:
        self.entered += 1
        self._stack.append(module)

    def _leave(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Modules inside that were left in a hurry (an early stop, Ctrl-C) have not said so: they are over, too."""
        stack = self._stack
        while stack and stack.pop() is not module:
            pass


def _in_backward() -> bool:
    """Whether autograd runs this: a forward pass in it (activation checkpointing) was seen the first time."""
    return bool(torch._C._current_graph_task_id() != -1)
