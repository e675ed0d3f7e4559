"""Tokens stand for whoever a graph must reach, and operators call them when it runs."""

import pytest
import torch
from torch import nn

from hookline import HookManager
from hookline.activations import operators


class Holder:
    """Somebody."""


def test_tokens_are_used_again() -> None:
    """A hook that comes and goes a thousand times makes no thousand of them."""
    model, manager = nn.Linear(2, 2), HookManager()
    torch.compile(model, backend="eager")(torch.ones(1, 2))
    for _ in range(50):
        manager.register_capture_hook(model, "capture").remove()
    spare = len(operators._tokens)
    with manager.register_capture_hook(model, "capture"):
        assert len(operators._tokens) == spare - 1
    assert len(operators._tokens) == spare


def test_a_token_reaches_its_holder_and_keeps_nobody_alive() -> None:
    """Nor does it reach anybody once it was given back, or the holder is gone."""
    holder = Holder()
    token = operators.take_token(holder)
    assert operators.holder_of(token) is holder
    operators.give_back(token)
    assert operators.holder_of(token) is None
    token = operators.take_token(Holder())
    assert operators.holder_of(token) is None


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # importing inductor
def test_an_operator_is_called_each_time_the_graph_runs() -> None:
    """And not while it is traced."""
    seen: list[float] = []
    note = operators.operator(
        "noted_in_a_test(Tensor value, Tensor(a!) token) -> ()", lambda value, _: seen.append(float(value))
    )
    token = torch.zeros(1)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(value: torch.Tensor) -> torch.Tensor:
        note(value, token)
        return value + 1

    run(torch.tensor(1.0))
    run(torch.tensor(2.0))
    assert seen == [1.0, 2.0]
