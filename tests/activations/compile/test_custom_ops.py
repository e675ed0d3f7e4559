"""Operators in compiled graphs: objects are found by their ids, and nested values arrive as they were."""

from typing import Any, NamedTuple

import pytest
import torch

from hookline.activations.compile import custom_ops
from hookline.activations.compile.custom_ops import flatten, rebuild


class Target:
    """Something that a graph refers to."""


def test_an_id_leads_to_its_target_and_does_not_keep_it_alive() -> None:
    """It leads nowhere once it was given back or the target is gone."""
    target = Target()
    graph_id = custom_ops.take_id(target)
    assert custom_ops.object_of(graph_id) is target
    custom_ops.give_back_id(graph_id)
    assert custom_ops.object_of(graph_id) is None
    graph_id = custom_ops.take_id(Target())
    assert custom_ops.object_of(graph_id) is None


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # importing inductor
def test_an_operator_is_called_each_time_the_graph_runs() -> None:
    """Not while it is traced."""
    seen: list[float] = []
    note = custom_ops.define_operator(
        "noted_in_a_test(Tensor value, Tensor(a!) graph_id) -> ()", lambda value, _: seen.append(float(value))
    )
    graph_id = torch.zeros(1)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(value: torch.Tensor) -> torch.Tensor:
        note(value, graph_id)
        return value + 1

    run(torch.tensor(1.0))
    run(torch.tensor(2.0))
    assert seen == [1.0, 2.0]


class Pair(NamedTuple):
    """A named tuple."""

    left: Any
    right: Any


def round_trip(value: Any, exact: bool = True) -> Any:
    """What arrives of a value."""
    tensors: list[torch.Tensor] = []
    structure = flatten(value, tensors, exact)
    return None if structure is None else rebuild(structure, tensors)


@pytest.mark.parametrize(
    "value",
    [(), [], {}, None, True, 'it\'s "text"', ("one",), [None, (False, {"a": "b", 2: []})]],
    ids=str,
)
def test_containers_and_constants_arrive_as_they_are(value: Any) -> None:
    """With their types: a tuple of one stays a tuple, and False is not 0."""
    made = round_trip(value)
    assert made == value and type(made) is type(value)


def test_tensors_arrive_without_their_graph() -> None:
    """In the same positions."""
    one, two = torch.ones(2, requires_grad=True) * 2, torch.zeros(3)
    made = round_trip({"a": (one, [two]), "b": two})
    assert torch.equal(made["a"][0], one) and torch.equal(made["b"], two) and torch.equal(made["a"][1][0], two)
    assert not made["a"][0].requires_grad


@pytest.mark.parametrize("value", [3, 2.5, Pair(1, 2), object(), (torch.ones(1), [object()]), {"a": torch.Size([2])}])
def test_what_cannot_be_described_exactly_is_refused(value: Any) -> None:
    """Numbers may vary, and other types may need more than their items."""
    assert round_trip(value) is None


def test_inexactly_subclasses_become_plain_and_unknown_objects_none() -> None:
    """Enough to find the tensors."""
    made = round_trip((Pair(torch.ones(1), 3), object()), exact=False)
    assert type(made[0]) is tuple and torch.equal(made[0][0], torch.ones(1)) and made[0][1] is made[1] is None
