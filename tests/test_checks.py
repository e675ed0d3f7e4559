"""An invalid name or choice is rejected with the parameter, the value and what would be valid."""

import pytest

from hookline import _parameters
from hookline.errors import ConfigError


def test_choices_are_listed() -> None:
    """The nearest one is proposed."""
    assert _parameters.one_of("min", ("min", "max"), "mode") == "min"
    with pytest.raises(ConfigError, match="mode: invalid value 'maxx'; did you mean 'max'"):
        _parameters.one_of("maxx", ("min", "max"), "mode")


def test_one_name_need_not_be_in_a_list() -> None:
    """Text is one name, and never a sequence of letters."""
    assert _parameters.names("abc", "allow") == ("abc",)
    assert _parameters.names(["a", "b"], "allow") == _parameters.names({"a": 1, "b": 2}, "allow") == ("a", "b")
    for wrong in (3, None, [1], ["a", None]):
        with pytest.raises(ConfigError, match=r"^allow: expected a name or a list of names, got "):
            _parameters.names(wrong, "allow")
