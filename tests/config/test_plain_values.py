"""What a configuration may hold."""

from typing import Any

import pytest

from hookline.config.plain_values import LARGEST, MAX_DEPTH, MAX_KEY, MAX_NODES, plain_copy
from hookline.errors import ConfigError


def test_what_is_plain_is_copied() -> None:
    """Values stay as they are, tuples become lists, and nothing is shared with what was given."""
    text = "line\n\ttab, é, 日本"
    given: dict[str, Any] = {"a": {"b": (1, 2.5, None, True, text), "c": -LARGEST}, "d": [LARGEST - 1]}
    copied = plain_copy(given, "x")
    assert copied == {**given, "a": {**given["a"], "b": list(given["a"]["b"])}}
    copied["a"]["c"] = 0
    assert given["a"]["c"] == -LARGEST


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("a\0b", r"holds '\x00'"),
        ("\x1b[2J", r"holds '\x1b'"),
        ("\x9b2J", r"holds '\x9b'"),
        ("over\rwritten", r"holds '\r'"),
        ("\ud800", r"holds '\ud800'"),
        (LARGEST, "more than 64 bits"),
        (-LARGEST - 1, "more than 64 bits"),
        pytest.param(10**10_000, "more than 64 bits", id="huge"),
        ({3: 1}, "expected a key that is a word, got 3 (int)"),
        ({None: 1}, "expected a key that is a word"),
        ({"a\n": 1}, "a key is no word"),
        ({"k" * (MAX_KEY + 1): 1}, f"at most {MAX_KEY} characters"),
    ],
)
def test_what_no_setting_is(value: Any, problem: str) -> None:
    """Each is named by its dotted path, in words that can be printed."""
    with pytest.raises(ConfigError) as caught:
        plain_copy({"hooks": {"forward": [1, value]}}, "x")
    assert caught.value.path == "hooks.forward.1"
    assert problem in caught.value.problem
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300


@pytest.mark.parametrize("tree", [{"a": [0] * MAX_NODES}, {"a": {"b": [[0] * 99] * (MAX_NODES // 99)}}])
def test_too_many_values(tree: Any) -> None:
    """Values that are shared count wherever they stand."""
    with pytest.raises(ConfigError, match="x: is too large"):
        plain_copy(tree, "x")


def test_too_many_levels() -> None:
    """A value that contains itself ends as one that is too deep."""
    tree: dict[str, Any] = {}
    tree["a"] = tree
    with pytest.raises(ConfigError, match=f"more than {MAX_DEPTH} levels"):
        plain_copy(tree, "x")
