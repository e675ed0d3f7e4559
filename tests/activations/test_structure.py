"""Nested values as text and tensors, and back."""

from typing import Any, NamedTuple

import pytest
import torch

from hookline.activations.structure import flatten, rebuild


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
