"""How the tap calls hooks that bring a shorter way of their own: all of them, by their policies, with a clock."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hookline import ForwardHook, get_trainer
from hookline.activations import direct
from hookline.activations.direct import PLACE, DirectCall
from hookline.activations.manager import HookManager


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Failures are expected here."""
    caplog.set_level(logging.CRITICAL, "hookline")


class Short(ForwardHook):
    """Hears modules on a shorter way, and may fail there."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.heard: list[str] = []

    def on_forward(self, name: str) -> None:
        self.heard.append(f"{name}, on the long way")

    def shortcut(self, site: Any, tap: Any) -> Callable[[Any, Any, Any], None]:
        """What is called instead of `on_forward`."""

        def keep(inputs: Any, kwargs: Any, output: Any) -> None:
            self.heard.append(site.name)
            if self.error is not None:
                raise self.error

        return keep


def watched(**hooks: tuple[Short, str]) -> tuple[HookManager, nn.Module]:
    """A model of two modules, and these hooks with their policies."""
    model, manager = nn.Sequential(nn.Linear(2, 2)), HookManager()
    manager.watch(model)
    for name, (hook, policy) in hooks.items():
        manager.register(hook, name, on_error=policy)
    return manager, model


def test_all_shorter_ways_are_taken_whoever_fails() -> None:
    """One that fails quietly is counted; of those that insist, the first is raised when all have heard."""
    quietly, first, second, last = Short(KeyError()), Short(ValueError("first")), Short(OSError("second")), Short()
    hooks = {"q": (quietly, "warn"), "a": (first, "raise"), "b": (second, "raise"), "z": (last, "warn")}
    manager, model = watched(**hooks)
    with pytest.raises(ValueError, match="first"):
        model(torch.ones(1, 2))
    assert all(hook.heard == ["0"] for hook, _ in hooks.values())
    assert [manager.entry(name).failures.total for name in hooks] == [1, 1, 1, 0]


def test_beside_a_hook_without_one_they_are_called_in_order() -> None:
    """A hook that changes the output stands between them: the later one gets what it made of it."""
    seen: list[float] = []

    class Sees(Short):
        def shortcut(self, site: Any, tap: Any) -> Callable[[Any, Any, Any], None]:
            return lambda inputs, kwargs, output: seen.append(output.sum().item())

    class Doubles(ForwardHook):
        intervene = True

        def on_forward(self, output: torch.Tensor) -> torch.Tensor:
            return output * 2

    model, manager = nn.Sequential(nn.Identity()), HookManager(enable_intervention=True)
    manager.watch(model)
    for name, hook in {"a": Sees(), "b": Doubles(), "c": Sees()}.items():
        manager.register(hook, name)
    assert model(torch.ones(1, 2)).sum().item() == 4
    assert seen == [2, 4]


def test_the_shorter_way_is_timed_when_its_hook_becomes_due() -> None:
    """One hook or several at a module: each timed call is in the account of the hook it belongs to."""
    model = nn.Linear(2, 1)
    trainer = get_trainer(
        "simple", model, [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(8)],
        torch.optim.SGD(model.parameters(), 1e-3), "cpu", console=False, record=False, loss_fn=nn.functional.mse_loss,
    )  # fmt: skip
    trainer.add_hook(Short(), "often", every=2)
    trainer.add_hook(Short(), "rarely", every=4)
    trainer.train()
    costs = {name: trainer.hooks.entry(name).inner_cost for name in ("often", "rarely")}
    assert [cost.calls for cost in costs.values()] == [3, 2]  # at steps 2, 4 and 8; step 6 is not timed
    assert all(cost.ns > 0 for cost in costs.values())


def test_several_shorter_ways_are_taken_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hooks at a module do not send it the long way through torch; each failure is its own hook's."""
    monkeypatch.setattr(direct, "has_begun", lambda: False)
    one, other = Short(), Short()
    manager, model = watched(one=(one, "warn"), other=(other, "warn"))
    for _ in range(3):
        model(torch.ones(1, 2))
    assert isinstance(vars(model[0])[PLACE], DirectCall)
    one.error = KeyError()
    model(torch.ones(1, 2))
    assert (one.heard, other.heard) == (["0"] * 4, ["0"] * 4)
    assert [manager.entry(name).failures.total for name in ("one", "other")] == [1, 0]
