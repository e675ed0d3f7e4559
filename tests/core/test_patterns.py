"""Selecting by name, glob, regex, class, predicate and identity; a pattern that matches nothing is an error."""

from typing import Any

import pytest
import torch

from hookline import HooklineError
from hookline.core.patterns import select

MODEL = torch.nn.ModuleDict(
    {
        "embed": torch.nn.Embedding(4, 4),
        "a": torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()),
        "a1": torch.nn.ReLU(),
    }
)
MODULES = {name: module for name, module in MODEL.named_modules() if name}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("embed", ["embed"]),
        ("a.*", ["a.0", "a.1"]),
        ("*", ["embed", "a", "a.0", "a.1", "a1"]),
        (r"re:a\.\d", ["a.0", "a.1"]),
        ("re:a", ["a"]),
        (torch.nn.ReLU, ["a.1", "a1"]),
        (lambda name, module: name.endswith("0"), ["a.0"]),
        (MODEL["a"], ["a"]),
        (["a1", "embed"], ["embed", "a1"]),
        (["a.*", "a.0"], ["a.0", "a.1"]),
        ({"embed"}, ["embed"]),
    ],
)
def test_patterns_select_in_the_order_of_the_things(pattern: Any, names: list[str]) -> None:
    """Every form selects what it says, each thing once, in the model's order."""
    assert list(select(pattern, MODULES, "module")) == names


@pytest.mark.parametrize("pattern", ["embd", "re:b.*", torch.nn.Conv1d, lambda name, module: False, MODEL, ["a", "zz"]])
def test_a_pattern_that_matches_nothing_is_an_error(pattern: Any) -> None:
    """Also one of several: a typo must not make a hook deaf."""
    with pytest.raises(HooklineError, match=r"module pattern .* matches nothing"):
        select(pattern, MODULES, "module")


def test_a_miss_names_the_nearest_and_a_broken_regex_says_why() -> None:
    """The error says what would be right."""
    with pytest.raises(HooklineError, match="did you mean 'embed'"):
        select("embd", MODULES, "module")
    with pytest.raises(HooklineError, match="did you mean 'class:ReLU'"):
        select("ReLU", MODULES, "module")
    with pytest.raises(HooklineError, match=r"'re:\(' is not a regular expression"):
        select("re:(", MODULES, "module")


def test_a_name_with_glob_characters_matches_itself() -> None:
    """An exact name wins over its reading as a glob."""
    assert select("w[0]", {"w[0]": 1, "w0": 2}, "parameter") == {"w[0]": 1, "w0": 2}


def test_a_class_may_be_given_by_name() -> None:
    """Also that of a base class, as in isinstance."""
    things = {"one": 1, "yes": True, "text": "x"}
    assert list(select("class:int", things, "thing")) == ["one", "yes"]
    assert list(select("class:bool", things, "thing")) == ["yes"]


def test_everything_of_a_single_module_is_its_root() -> None:
    """A model without children can be watched with "*", too; the nameless root is not suggested."""
    assert select("*", {"": 1}, "module") == {"": 1}
    assert select("*", {"": 1, "a": 2}, "module") == {"a": 2}
    with pytest.raises(HooklineError, match=r"'b' matches nothing; valid: a$"):
        select("b", {"": 1, "a": 2}, "module")
