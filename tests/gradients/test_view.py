"""Test the live view of gradients by name, in which nothing is written before it is committed."""

from typing import Any

import pytest
import torch

from hookline.errors import GradientError
from hookline.gradients.view import Gradients


@pytest.fixture
def params() -> dict[str, torch.nn.Parameter]:
    """Make three parameters, the last without a gradient."""
    made = {name: torch.nn.Parameter(torch.zeros(2)) for name in ("a", "b", "frozen")}
    made["a"].grad, made["b"].grad = torch.ones(2), torch.full((2,), 2.0)
    return made


def test_it_is_a_mapping_of_what_is_there(params: dict[str, torch.nn.Parameter]) -> None:
    """Parameters without a gradient are not listed; the tensors are the parameters' own."""
    grads = Gradients(params)
    assert list(grads) == ["a", "b"] and len(grads) == 2 and "frozen" not in grads
    assert grads["a"] is params["a"].grad and grads.tensors()[1] is params["b"].grad
    assert repr(grads) == "Gradients(2 of 3 parameters)"
    for missing in ("frozen", "stranger"):
        with pytest.raises(KeyError):
            grads[missing]


def test_nothing_is_written_before_commit(params: dict[str, torch.nn.Parameter]) -> None:
    """An assigned gradient is stored until `commit`; `discard` drops it."""
    grads, old = Gradients(params), params["a"].grad
    grads["a"] = torch.zeros(2)
    del grads["b"]
    assert params["a"].grad is old and params["b"].grad is not None
    assert grads["a"].sum() == 0 and list(grads) == ["a"]
    grads.discard()
    assert grads["a"] is old and list(grads) == ["a", "b"]


def test_commit_takes_over_assignments_and_removals(params: dict[str, torch.nn.Parameter]) -> None:
    """Committing the view itself applies what was assigned, also to a parameter that had none."""
    grads = Gradients(params)
    grads["a"] = new = torch.zeros(2)
    del grads["b"]
    grads["frozen"] = torch.ones(2)
    grads.commit(grads)
    assert params["a"].grad is not None and torch.equal(params["a"].grad, new) and params["b"].grad is None
    assert params["frozen"].grad is not None and list(grads) == ["a", "frozen"]


def test_commit_takes_a_new_mapping_with_none_for_removed(params: dict[str, torch.nn.Parameter]) -> None:
    """A plain dict replaces all gradients."""
    Gradients(params).commit({"a": torch.zeros(2), "b": None})
    assert params["a"].grad is not None and params["a"].grad.sum() == 0 and params["b"].grad is None


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "returned None"),
        (3, "returned int; return a mapping"),
        ({"a": torch.zeros(2)}, r"dropped 'b'; return every gradient"),
        ({"a": torch.zeros(2), "b": torch.zeros(2), "c": None}, "returned 'c', which is not a parameter here"),
        ({"a": torch.zeros(2), "b": 3.0}, "'b': returned float, not a tensor"),
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, r"'b': returned shape \(3,\), the parameter has \(2,\)"),
        ({"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.float64)}, "'b': returned dtype torch.float64"),
        ({"a": torch.zeros(2), "b": torch.zeros(2, device="meta")}, "'b': returned device meta"),
        ({"a": torch.zeros(2), "b": torch.zeros(2, requires_grad=True)}, "'b': .*has a graph; detach it"),
        ({"a": torch.zeros(2), "b": torch.zeros(2).to_sparse()}, "'b': returned layout torch.sparse_coo"),
    ],
)
def test_a_wrong_return_changes_nothing(params: dict[str, torch.nn.Parameter], returned: Any, message: str) -> None:
    """Even a gradient that fits is not used if another one does not."""
    before = params["a"].grad
    with pytest.raises(GradientError, match=message):
        Gradients(params).commit(returned)
    assert params["a"].grad is before and params["b"].grad is not None


def test_a_sparse_gradient_may_stay_sparse_or_become_dense(params: dict[str, torch.nn.Parameter]) -> None:
    """The layout may be the parameter's or that of the previous gradient."""
    for returned in (torch.ones(2).to_sparse(), torch.ones(2)):
        params["a"].grad = torch.zeros(2).to_sparse()
        Gradients(params).commit({"a": returned, "b": None})
        assert params["a"].grad.layout is returned.layout


def test_committed_gradients_are_copies(params: dict[str, torch.nn.Parameter]) -> None:
    """Returned tensors are copied; a gradient that stays is the same object."""
    new, old = torch.zeros(2), params["b"].grad
    Gradients(params).commit({"a": new, "b": old})
    assert params["a"].grad is not new and params["b"].grad is old


def test_an_assignment_to_no_parameter_names_the_nearest(params: dict[str, torch.nn.Parameter]) -> None:
    """A typo in an update hook raises at once."""
    with pytest.raises(KeyError, match="'frozn' is not a parameter here; did you mean 'frozen'"):
        Gradients(params)["frozn"] = torch.zeros(2)
    with pytest.raises(KeyError):
        del Gradients(params)["frozen"]
