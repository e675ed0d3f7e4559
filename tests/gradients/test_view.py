"""Test the live view of gradients that an update hook gets, in which nothing is written before the hook returns."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hookline.errors import GradientError

Params = dict[str, torch.nn.Parameter]
Run = Callable[[Callable[[Any], Any]], None]


@pytest.fixture
def params() -> Params:
    """Make three parameters, the last without a gradient."""
    made = {name: torch.nn.Parameter(torch.zeros(2)) for name in ("a", "b", "frozen")}
    made["a"].grad, made["b"].grad = torch.ones(2), torch.full((2,), 2.0)
    return made


@pytest.fixture
def run(rig: Any, params: Params) -> Run:
    """Return a function that runs an update hook over the gradients; what it raises is raised."""

    def run_hook(hook: Callable[[Any], Any]) -> None:
        chain = rig(params)
        chain.registry.register(lambda grads: hook(grads), "hook", event="update", on_error="raise")
        chain.step()

    return run_hook


def test_it_is_a_mapping_of_what_is_there(run: Run, params: Params) -> None:
    """Parameters without a gradient are not listed; the tensors are the parameters' own."""

    def reads(grads: Any) -> Any:
        assert list(grads) == ["a", "b"] and len(grads) == 2 and "frozen" not in grads
        assert grads["a"] is params["a"].grad and grads.tensors()[1] is params["b"].grad
        assert repr(grads) == "Gradients(2 of 3 parameters)"
        for missing in ("frozen", "stranger"):
            with pytest.raises(KeyError):
                grads[missing]
        return grads

    run(reads)


def test_assignments_are_taken_over_when_the_hook_returns(run: Run, params: Params) -> None:
    """The hook sees what it assigned and removed, the parameters do not yet; one without a gradient may get one."""
    old, new = params["a"].grad, torch.zeros(2)

    def assigns(grads: Any) -> Any:
        grads["a"] = new
        del grads["b"]
        grads["frozen"] = torch.ones(2)
        assert params["a"].grad is old and params["b"].grad is not None
        assert grads["a"] is new and list(grads) == ["a", "frozen"]
        assert grads.norm().item() == pytest.approx(2**0.5)
        return grads

    run(assigns)
    assert params["a"].grad is not None and torch.equal(params["a"].grad, new) and params["b"].grad is None
    assert params["frozen"].grad is not None


def test_a_new_mapping_replaces_all_gradients(run: Run, params: Params) -> None:
    """None for a name removes its gradient."""
    run(lambda grads: {"a": torch.zeros(2), "b": None})
    assert params["a"].grad is not None and params["a"].grad.sum() == 0 and params["b"].grad is None


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "returned None"),
        (3, "returned int; return a mapping"),
        ({"a": torch.zeros(2)}, r"dropped 'b'; return every gradient"),
        ({"a": torch.zeros(2), "b": torch.zeros(2), "c": None}, "returned 'c', which is not a parameter here"),
        ({"a": torch.zeros(2), "b": 3.0}, "'b': returned float, not a tensor"),
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, r"'b': returned shape \(3,\), but the parameter has \(2,\)"),
        ({"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.float64)}, "'b': returned dtype torch.float64"),
        ({"a": torch.zeros(2), "b": torch.zeros(2, device="meta")}, "'b': returned device meta"),
        ({"a": torch.zeros(2), "b": torch.zeros(2, requires_grad=True)}, "'b': .*has a graph; detach it"),
        ({"a": torch.zeros(2), "b": torch.zeros(2).to_sparse()}, "'b': returned layout torch.sparse_coo"),
    ],
)
def test_a_wrong_return_changes_nothing(run: Run, params: Params, returned: Any, message: str) -> None:
    """Even a gradient that fits is not used if another one does not."""
    before = params["a"].grad
    with pytest.raises(GradientError, match=message):
        run(lambda grads: returned)
    assert params["a"].grad is before and params["b"].grad is not None


def test_a_sparse_gradient_may_stay_sparse_or_become_dense(run: Run, params: Params) -> None:
    """The layout may be the parameter's or that of the previous gradient."""
    for returned in (torch.ones(2).to_sparse(), torch.ones(2)):
        params["a"].grad, params["b"].grad = torch.zeros(2).to_sparse(), torch.ones(2)
        run(lambda grads, new=returned: {"a": new, "b": None})
        assert params["a"].grad.layout is returned.layout


def test_a_gradient_that_stays_is_the_same_object(run: Run, params: Params) -> None:
    """Other tensors that a hook returns are copied."""
    new, old = torch.zeros(2), params["b"].grad
    run(lambda grads: {"a": new, "b": old})
    assert params["a"].grad is not new and params["b"].grad is old


def test_an_assignment_to_no_parameter_names_the_nearest(run: Run) -> None:
    """A typo in an update hook raises at once."""

    def misspells(grads: Any) -> Any:
        with pytest.raises(KeyError):
            del grads["frozen"]
        grads["frozn"] = torch.zeros(2)

    with pytest.raises(KeyError, match="'frozn' is not a parameter here; did you mean 'frozen'"):
        run(misspells)
