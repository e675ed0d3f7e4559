"""An invalid parameter is rejected with its name, its value and what would be valid."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from hookline import _checks
from hookline.errors import ConfigError

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("check", "valid", "invalid"),
    [
        (_checks.boolean, [True, False], ["no", 1, 0, None]),
        (partial(_checks.integer, at_least=1), [1, 7], [0, -1, True, 2.0, "3", None]),
        (partial(_checks.optional, _checks.integer, at_least=1), [1, None], [0, True, 2.5]),
        (_checks.number, [0, -1.5, 3], [NAN, INF, True, "1", None]),
        (partial(_checks.optional, _checks.number), [0.5, None], [NAN, "1"]),
    ],
)
def test_each_check_accepts_what_it_should(check: Callable[..., Any], valid: list[Any], invalid: list[Any]) -> None:
    """A valid value is returned unchanged; an invalid one is an error that names the parameter and the value."""
    assert [check(value, "it") for value in valid] == valid
    for value in invalid:
        with pytest.raises(ConfigError) as caught:
            check(value, "it")
        assert str(caught.value).startswith("it: expected ") and repr(value) in str(caught.value)


def test_bounds_are_in_the_message() -> None:
    """A number out of bounds is rejected with the bounds."""
    assert _checks.number(1, "share", at_least=0, at_most=1) == 1.0
    with pytest.raises(ConfigError, match="share: expected a finite number, at least 0 and at most 1, got 2"):
        _checks.number(2, "share", at_least=0, at_most=1)
    with pytest.raises(ConfigError, match="share: expected a finite number, above 0 and at most 1, got 0"):
        _checks.number(0, "share", above=0, at_most=1)


def test_choices_are_listed() -> None:
    """The nearest one is proposed."""
    assert _checks.one_of("min", ("min", "max"), "mode") == "min"
    with pytest.raises(ConfigError, match="mode: invalid value 'maxx'; did you mean 'max'"):
        _checks.one_of("maxx", ("min", "max"), "mode")


def test_one_name_need_not_be_in_a_list() -> None:
    """Text is one name, and never a sequence of letters."""
    assert _checks.names("abc", "allow") == ("abc",)
    assert _checks.names(["a", "b"], "allow") == _checks.names({"a": 1, "b": 2}, "allow") == ("a", "b")
    for wrong in (3, None, [1], ["a", None]):
        with pytest.raises(ConfigError, match=r"^allow: expected a name or a list of names, got "):
            _checks.names(wrong, "allow")
