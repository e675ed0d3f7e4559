"""Observing a model for long leaks nothing: no tensors, no torch hooks, no growing tables."""

import gc
import tracemalloc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hookline import ForwardHook, HookManager

INPUT = torch.randn(4, 8)


class Observer(ForwardHook):
    """Names many arguments and keeps none of them."""

    def on_forward(self, name: str, inputs: object, output: object, step: int, seconds: float) -> None:
        """Nothing."""


def make_model() -> nn.Sequential:
    """Make a model of a few layers."""
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Dropout(0.1))


def staying() -> Callable[[], None]:
    """Register hooks of every kind that stay."""
    model, manager = make_model(), HookManager(max_captured_states=8, memory_limit_mb=1, cleanup_interval=50)
    manager.watch(model)
    manager.register(Observer())
    manager.register_capture_hook("?", "capture")
    manager.register_monitoring_hook("?", "monitor", metrics=["mean", "time"])

    def forward() -> None:
        manager.dispatcher.run.step += 1
        model(INPUT).sum().backward()
        if manager.dispatcher.run.step % 50 == 0:
            manager.get("monitor").latest()  # in a run the loop does this at every step

    return forward


def coming_and_going() -> Callable[[], None]:
    """Register and remove a hook for every forward pass."""
    model, manager = make_model(), HookManager()

    def forward() -> None:
        with manager.capturing(model) as cache:
            model(INPUT)
        assert len(cache) == 4
        manager.register_capture_hook(model[0], "short").remove()

    return forward


def growth(forward: Callable[[], None], warm_up: int, forwards: int) -> tuple[int, int]:
    """Return the tensors and the bytes of Python's memory that some forward passes left behind."""
    tracemalloc.start()
    for _ in range(warm_up):
        forward()
    gc.collect()
    tensors, memory = alive(), tracemalloc.get_traced_memory()[0]
    for _ in range(forwards):
        forward()
    gc.collect()
    grown = alive() - tensors, tracemalloc.get_traced_memory()[0] - memory
    tracemalloc.stop()
    return grown


def alive() -> int:
    """Return the number of tensors that exist."""
    return sum(issubclass(type(value), torch.Tensor) for value in gc.get_objects())


@pytest.mark.req("003-34", "003-35")
@pytest.mark.parametrize("make", [staying, coming_and_going], ids=lambda make: make.__name__)
def test_nothing_is_left_behind(make: Callable[[], Callable[[], None]]) -> None:
    """After a warm-up that fills every buffer, 300 forward passes leave no tensor and hardly a byte."""
    tensors, memory = growth(make(), 1050, 300)
    assert tensors <= 0 and memory < 30_000


@pytest.mark.soak
@pytest.mark.parametrize("make", [staying, coming_and_going], ids=lambda make: make.__name__)
def test_nothing_is_left_behind_over_ten_thousand_forwards(make: Callable[[], Callable[[], None]]) -> None:
    """The same holds for 10,000 forward passes, where a byte per pass would be noticed."""
    tensors, memory = growth(make(), 3000, 10_000)
    assert tensors <= 0 and memory < 10_000
