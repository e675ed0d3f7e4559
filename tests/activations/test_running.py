"""Which module runs now: the innermost, in this thread, whatever ended the pass before."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hookline.activations.hooked_modules import RunningModules


class Asks(nn.Module):
    """Asks who is running, in the middle of its forward."""

    def __init__(self, running: RunningModules, fails: type[BaseException] | None = None) -> None:
        super().__init__()
        self.running, self.fails = running, fails
        self.answers: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.answers.append(self.running.innermost)
        if self.fails is not None:
            raise self.fails
        return x.exp()


def test_the_innermost_module() -> None:
    """A module inside another, and the outer one again behind it; None before and after."""

    class Outer(Asks):
        def __init__(self, running: RunningModules) -> None:
            super().__init__(running)
            self.inner = Asks(running)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.inner(x))

    running = RunningModules()
    outer = Outer(running)
    with running.following(outer):
        outer(torch.ones(1))
        assert running.innermost is None
    assert outer.answers == [outer] and outer.inner.answers == [outer.inner]
    assert running.entered == 2
    outer(torch.ones(1))
    assert outer.answers[1] is None and running.entered == 2


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_a_pass_that_ended_badly_is_forgotten(failure: type[BaseException]) -> None:
    """Torch tells a module's end after an exception, but not after an interrupt; neither confuses the next pass."""
    running = RunningModules()
    broken, fine = Asks(running, failure), Asks(running)
    model = nn.Sequential(nn.Sequential(broken), fine)
    with running.following(model):
        with pytest.raises(failure):
            model(torch.ones(1))
        broken.fails = None
        model(torch.ones(1))
    assert broken.answers == [broken, broken] and fine.answers == [fine]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_threads_are_apart() -> None:
    """Another thread inside the model is not where this one is."""
    running, inside, go_on = RunningModules(), threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            go_on.wait(5)
            return x

    model = Waits()
    with running.following(model):
        other = threading.Thread(target=model, args=(torch.ones(1),))
        other.start()
        assert inside.wait(5)
        assert running.entered == 1 and running.innermost is None
        go_on.set()
        other.join()


def test_a_pass_repeated_by_backward_does_not_count() -> None:
    """Activation checkpointing runs the module again: nobody runs then."""
    running = RunningModules()
    model = Asks(running)
    with running.following(model):
        made: Tensor = checkpoint(model, torch.ones(1, requires_grad=True), use_reentrant=False)  # type: ignore[assignment]
        made.sum().backward()
    assert model.answers == [model, None]
