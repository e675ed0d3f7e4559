"""Errors say what was wrong and what would be right."""

import pytest

from hookline import HooklineError, StopTraining, errors
from hookline.errors import ConfigError, MetricMissing, nearest


def test_every_error_has_one_base_and_stopping_is_not_an_error() -> None:
    """`except HooklineError` catches all that is raised on purpose, and never a request to stop."""
    raised = {
        value for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, Exception) and value is not StopTraining
    }  # fmt: skip
    assert len(raised) > 5 and all(issubclass(error, HooklineError) for error in raised)
    assert not issubclass(StopTraining, HooklineError)


def test_every_error_says_what_it_is_for() -> None:
    """Each class has its own docstring."""
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, Exception):
            assert value.__dict__.get("__doc__"), value


def test_a_config_error_leads_with_its_path() -> None:
    """The dotted path comes first, and both parts stay readable by programs."""
    error = ConfigError("hooks.x.every", "0 is never due")
    assert str(error) == "hooks.x.every: 0 is never due"
    assert (error.path, error.problem) == ("hooks.x.every", "0 is never due")
    assert str(ConfigError("", "empty")) == "empty"


def test_a_strict_monitors_error_insists() -> None:
    """These carry the mark that overrides a hook's policy, and no others."""
    marked = [value for value in vars(errors).values() if getattr(value, "always_raise", False)]
    assert marked == [errors.NothingMatches, MetricMissing, errors.LiveWrite]


@pytest.mark.parametrize(
    ("name", "choices", "sentence"),
    [
        ("tarin", ["train", "epoch"], "did you mean 'train'? Valid: epoch, train"),
        ("zzz", ["train", "epoch"], "Valid: epoch, train"),
        ("x", [], "there are none"),
        ("", ["a", "a"], "Valid: a"),
    ],
)
def test_nearest_lists_the_choices(name: str, choices: list[str], sentence: str) -> None:
    """The nearest first, the rest sorted, each once; nothing is invented where nothing is close."""
    assert nearest(name, choices) == sentence


def test_a_long_list_is_cut_to_the_closest_and_says_so() -> None:
    """With many choices the closest are shown, the best one among them."""
    said = nearest("hook_042", [f"hook_{i:03d}" for i in range(100)], limit=5)
    assert said.startswith("did you mean 'hook_042'? Valid: hook_042")
    assert said.count("hook_") == 6 and said.endswith("(and 95 more)")


@pytest.mark.parametrize(
    ("noun", "expected"),
    [("update hook", "an update hook"), ("lifecycle hook", "a lifecycle hook"), ("UpdateHook", "an UpdateHook"),
     ("int", "an int"), ("UserDict", "a UserDict"), ("optimizer", "an optimizer")],
)  # fmt: skip
def test_nouns_get_their_article(noun: str, expected: str) -> None:
    """The kind of a hook, a type and a registered name are written as they are spoken."""
    assert errors.with_article(noun) == expected
