"""What a constructor cannot use is refused with its name, the value, and what would be right."""

from collections.abc import Callable
from typing import Any

import pytest

from hookline.errors import ConfigError
from hookline.hooks import parameters

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (parameters.switch, [True, False], ["no", 1, 0, None]),
        (parameters.text, ["val/loss"], ["", None, 3, ["a"]]),
        (parameters.text_or_none, ["val/loss", None], ["", 3]),
        (parameters.whole_number, [1, 7], [0, -1, True, 2.0, "3", None]),
        (parameters.whole_number_or_none, [1, None], [0, True, 2.5]),
        (parameters.number, [0, -1.5, 3], [NAN, INF, True, "1", None]),
        (parameters.number_or_none, [0.5, None], [NAN, "1"]),
    ],
)
def test_each_kind_takes_what_it_should(check: Callable[..., Any], good: list[Any], bad: list[Any]) -> None:
    """What is right comes back as it is; what is not is an error that names parameter and value."""
    assert [check(value, "it") for value in good] == good
    for value in bad:
        with pytest.raises(ConfigError) as caught:
            check(value, "it")
        assert str(caught.value).startswith("it: expected ") and repr(value) in str(caught.value)


def test_bounds_are_told() -> None:
    """A number that is out of bounds is refused with the bounds."""
    assert parameters.number(1, "share", 0, 1) == 1.0
    with pytest.raises(ConfigError, match="share: expected a number, at least 0, at most 1; got 2"):
        parameters.number(2, "share", 0, 1)


def test_words_have_their_choices() -> None:
    """The nearest one first."""
    assert parameters.one_of("min", ("min", "max"), "mode") == "min"
    with pytest.raises(ConfigError, match="mode: 'maxx' is no choice; did you mean 'max'"):
        parameters.one_of("maxx", ("min", "max"), "mode")
