"""Test which parameters a hook selects: by names, patterns, classes of modules, predicates and lists."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from builders import make_trainer
from torch import nn

from hookline import HooklineError, UpdateHook


class Model(nn.Module):
    """An embedding tied to the head, and two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)) for _ in range(2))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.tokens.weight


class Selects(UpdateHook):
    """A hook that notes which parameters it selects."""

    def __init__(self, params: Any) -> None:
        self.params = params

    def init(self, params: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        self.selected = list(params)
        return {}

    def on_update(self, grads: Any) -> Any:
        return grads


def chosen(pattern: Any, trained: str = "") -> list[str]:
    """Return the names that a pattern selects, in a run that trains the parameters with a prefix."""
    model = Model()
    given = pattern(model) if getattr(pattern, "__name__", "") == "<lambda>" else pattern
    params = [param for name, param in model.named_parameters() if name.startswith(trained)]
    hook = Selects(given)
    make_trainer(hook, model=model, optimizer=torch.optim.SGD(params, lr=0.1))
    return hook.selected


LINEAR = ["tokens.weight", "blocks.0.0.weight", "blocks.0.0.bias", "blocks.1.0.weight", "blocks.1.0.bias"]
BLOCK_1 = ["blocks.1.0.weight", "blocks.1.0.bias", "blocks.1.1.weight", "blocks.1.1.bias"]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("tokens.weight", ["tokens.weight"]),
        ("head.*", ["tokens.weight"]),
        (r"re:head\..*", ["tokens.weight"]),
        (lambda model: lambda name, param: not name.startswith(("tokens", "blocks.0")), BLOCK_1),
        ("blocks.0.*", ["blocks.0.0.weight", "blocks.0.0.bias", "blocks.0.1.weight", "blocks.0.1.bias"]),
        (r"re:blocks\.\d\.0\.bias", ["blocks.0.0.bias", "blocks.1.0.bias"]),
        (nn.Linear, LINEAR),
        ("class:Linear", LINEAR),
        ("class:Embedding", ["tokens.weight"]),
        ([nn.Embedding, "*.1.bias"], ["tokens.weight", "blocks.0.1.bias", "blocks.1.1.bias"]),
        (lambda model: model.blocks[1][1], ["blocks.1.1.weight", "blocks.1.1.bias"]),
        (lambda model: lambda name, param: name.endswith("0.bias"), ["blocks.0.0.bias", "blocks.1.0.bias"]),
        (lambda model: [model.head], ["tokens.weight"]),
    ],
)
def test_patterns(pattern: Any, names: list[str]) -> None:
    """Names are in the model's order; a tied weight is found through either module and under either name."""
    assert chosen(pattern) == names


def test_none_is_everything() -> None:
    """Without a pattern a hook selects all parameters."""
    assert chosen(None) == [name for name, _ in Model().named_parameters()]


@pytest.mark.parametrize("pattern", ["blokcs.*", "class:Conv2d", nn.Conv2d, lambda model: lambda name, param: False])
def test_a_pattern_that_matches_nothing_is_an_error(pattern: Any) -> None:
    """Every kind of pattern raises."""
    with pytest.raises(HooklineError, match="matches nothing"):
        chosen(pattern)


@pytest.mark.parametrize("pattern", ["class:Liner", type("Liner", (nn.Module,), {})])
def test_a_class_that_matches_nothing_lists_the_classes(pattern: Any) -> None:
    """The error lists classes, because names of modules would not help."""
    with pytest.raises(HooklineError, match=r"matches nothing; did you mean 'Linear'\? Valid: .*Linear"):
        chosen(pattern)


@pytest.mark.parametrize("empty", [[], (), set()])
def test_an_empty_list_is_an_error(empty: Any) -> None:
    """An empty list selects neither all nor none."""
    with pytest.raises(HooklineError, match="selects nothing; leave params out to select all"):
        chosen(empty)


def test_modules_whose_parameters_are_not_trained_are_an_error() -> None:
    """The pattern matches modules but no trained parameter."""
    with pytest.raises(HooklineError, match=r"matches 'tokens' and others, none of which is trained"):
        chosen(nn.Embedding, trained="blocks")
