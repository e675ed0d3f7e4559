"""Tokens stand for whoever a graph must reach, and operators call them when it runs."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from hookline import HookManager
from hookline.activations.compile import custom_ops
from hookline.activations.compile.custom_ops import flatten, rebuild


class Holder:
    """Somebody."""


def test_tokens_are_used_again() -> None:
    """A hook that comes and goes a thousand times makes no thousand of them."""
    model, manager = nn.Linear(2, 2), HookManager()
    torch.compile(model, backend="eager")(torch.ones(1, 2))
    for _ in range(50):
        manager.register_capture_hook(model, "capture").remove()
    spare = len(custom_ops._unused_ids)
    with manager.register_capture_hook(model, "capture"):
        assert len(custom_ops._unused_ids) == spare - 1
    assert len(custom_ops._unused_ids) == spare


def test_a_token_reaches_its_holder_and_keeps_nobody_alive() -> None:
    """Nor does it reach anybody once it was given back, or the holder is gone."""
    holder = Holder()
    token = custom_ops.take_id(holder)
    assert custom_ops.object_of(token) is holder
    custom_ops.give_back_id(token)
    assert custom_ops.object_of(token) is None
    token = custom_ops.take_id(Holder())
    assert custom_ops.object_of(token) is None


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # importing inductor
def test_an_operator_is_called_each_time_the_graph_runs() -> None:
    """And not while it is traced."""
    seen: list[float] = []
    note = custom_ops.define_operator(
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


class Pair(NamedTuple):
    """A named tuple."""

    left: Any
    right: Any


def there_and_back(value: Any, exact: bool = True) -> Any:
    """What arrives of a value."""
    tensors: list[torch.Tensor] = []
    told = flatten(value, tensors, exact)
    return None if told is None else rebuild(told, tensors)


@pytest.mark.parametrize(
    "value",
    [(), [], {}, None, True, 'it\'s "text"', ("one",), [None, (False, {"a": "b", 2: []})]],
    ids=str,
)
def test_containers_and_constants_arrive_as_they_are(value: Any) -> None:
    """Their types too: a tuple of one is none of two, and False is no number."""
    made = there_and_back(value)
    assert made == value and type(made) is type(value)


def test_tensors_arrive_in_their_places_without_their_graph() -> None:
    """A number in the text stands for each."""
    one, two = torch.ones(2, requires_grad=True) * 2, torch.zeros(3)
    made = there_and_back({"a": (one, [two]), "b": two})
    assert torch.equal(made["a"][0], one) and torch.equal(made["b"], two) and torch.equal(made["a"][1][0], two)
    assert not made["a"][0].requires_grad


@pytest.mark.parametrize("value", [3, 2.5, Pair(1, 2), object(), (torch.ones(1), [object()]), {"a": torch.Size([2])}])
def test_what_cannot_be_told_exactly_is_not_told(value: Any) -> None:
    """Numbers may vary, and of other types only their makers know how to make them."""
    assert there_and_back(value) is None


def test_inexactly_subclasses_become_plain_and_strangers_none() -> None:
    """Enough for who looks for tensors only."""
    made = there_and_back((Pair(torch.ones(1), 3), object()), exact=False)
    assert type(made[0]) is tuple and torch.equal(made[0][0], torch.ones(1)) and made[0][1] is made[1] is None
