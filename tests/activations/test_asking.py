"""How one asks for module hooks: options, conditions and modules, and what is said to those that mean nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hookline import HookManager
from hookline.activations.debug import parse_conditions
from hookline.errors import ConfigError, HooklineError, RegistrationError

BATCH = torch.randn(3, 4)
DOORS = ["register_capture_hook", "register_monitoring_hook", "register_debug_hook"]


def watched() -> tuple[nn.Sequential, HookManager]:
    """A model and a manager that watches it."""
    model, manager = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), HookManager()
    manager.watch(model)
    return model, manager


@pytest.mark.parametrize("door", DOORS)
def test_every_kind_takes_the_options_of_a_registration(door: str) -> None:
    """A schedule, a failure policy, the switch and the order: a user need not know which kind has which."""
    _, manager = watched()
    options = {"every": 10, "on_error": "raise", "enabled": False, "ranks": 0}
    getattr(manager, door)("0", "hook", **options)
    entry = manager.entry("hook")
    assert (str(entry.schedule), entry.policy, entry.enabled, entry.ranks) == ("every 10 steps", "raise", False, {0})


@pytest.mark.parametrize("door", DOORS)
def test_a_misspelt_option_is_refused_with_the_nearest(door: str) -> None:
    """It is one of the hook's or of the registration's."""
    _, manager = watched()
    with pytest.raises(RegistrationError, match="has no parameter 'on_eror'; did you mean 'on_error'"):
        getattr(manager, door)("0", "hook", on_eror="raise")
    assert list(manager.list_hooks()) == []


@pytest.mark.parametrize("modules", [[], None, [None]])
@pytest.mark.parametrize("door", DOORS)
def test_a_selection_of_nothing_is_refused(modules: Any, door: str) -> None:
    """With a model and without: such a hook would be silent for ever, and in no report."""
    for manager in (watched()[1], HookManager()):
        with pytest.raises(HooklineError, match=r"hook 'hook': modules=.* selects nothing; '\*' selects all"):
            getattr(manager, door)(modules, "hook")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("nan", ["nan > 0"]),
        (["nan", "inf"], ["nan > 0", "inf > 0"]),
        ("absmax > 1e4", ["absmax > 10000"]),
        (["zeros >= 0.9", {"std": "< 1e-6"}], ["zeros >= 0.9", "std < 1e-06"]),
    ],
)
def test_conditions_can_be_named(given: Any, expected: list[str]) -> None:
    """By a word, or by a comparison in one piece."""
    assert [str(condition) for condition in parse_conditions(given)] == expected


@pytest.mark.parametrize("given", ["", "absmax big", "> 3", "nan maybe"])
def test_a_word_that_is_no_condition_is_refused(given: str) -> None:
    """The message says what to write."""
    with pytest.raises(ConfigError, match=r"^conditions\..*(unknown statistic|invalid comparison .*; write)"):
        list(parse_conditions(given))


def test_a_named_condition_finds() -> None:
    """As the same in a mapping does."""
    model, manager = watched()
    manager.register_debug_hook("1", "guard", conditions=["nan", "absmax > 1e3"])
    model(BATCH)
    model(BATCH * 1e6)
    assert [finding.condition for finding in manager.get("guard").findings] == ["absmax > 1000"]


def test_a_function_among_words_is_asked() -> None:
    """Names, mappings and functions can stand in one list."""
    model, manager = watched()
    seen: list[str] = []
    ask: Callable[[str, Any], bool] = lambda name, output: bool(seen.append(name))  # noqa: E731
    manager.register_debug_hook("0", "guard", conditions=["nan", ask])
    model(BATCH)
    assert seen == ["0"]
