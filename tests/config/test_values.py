"""YAML from untrusted files, and the limits on keys and values of a config."""

import time
from pathlib import Path
from typing import Any

import pytest

from hookline import load_config
from hookline.errors import ConfigError

LARGEST = 2**63


def from_yaml(text: str) -> dict[str, Any]:
    """Return the content of a YAML file."""
    Path("x.yaml").write_text(text, encoding="utf-8")
    return load_config("x.yaml")[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5e-3", 5e-3),
        ("-1E6", -1e6),
        (".5e1", 5.0),
        ("1.5e+2", 150.0),
        ("1e", "1e"),
        ("e5", "e5"),
        ("12", 12),
        ("[1, true, null, x]", [1, True, None, "x"]),
        ("", None),
    ],
)
def test_plain_values_are_read(text: str, value: Any) -> None:
    """Plain values are read as their authors mean them, also numbers such as 5e-3."""
    read = from_yaml(f"model: {text}")["model"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: !!python/object/apply:os.system [ls]", "line 1: the tag '!!python/object/apply:os.system' is refused"),
        ("a: !mine 3", "the tag '!mine' is refused"),
        ("a: 1\nb: 2\na: 3", "line 3: the key 'a' appears twice (first on line 1)"),
        ("{a: 1, a: 2}", "twice"),
        ("&a [*a]", "line 1: the alias '*a' is refused; write its value out"),
        ("a: &a {x: 1}\nb: *a", "line 2: the alias '*a' is refused; write its value out"),
        ("a: 1\nb: {<<: {x: 1}}", "line 2: the merge key '<<' is refused; write its values out"),
        ("a: &a {x: 1}\nb:\n  <<: *a", "line 3: the alias '*a' is refused"),
        ("a: 1\nb: " + "9" * 101, "line 2: a number has more than 100 digits"),
        ("[" * 5000, "deeper than 50 levels"),
        ("a: [1", "is not valid YAML"),
        ("a: 1\n---\nb: 2", "is not valid YAML"),
        ("? [1]\n: 2", "is not valid YAML"),
    ],
)
def test_invalid_documents_are_rejected(text: str, words: str) -> None:
    """Tags, aliases, merges, duplicate keys and broken text are one clear error each, and quickly."""
    began = time.thread_time()
    with pytest.raises(ConfigError) as caught:
        from_yaml(text)
    assert caught.value.path == "x.yaml"
    assert words in caught.value.problem
    assert "\n" not in str(caught.value)
    assert time.thread_time() - began < 2


def test_plain_values_are_copied() -> None:
    """Values stay as they are, tuples become lists, and the copy shares nothing with the original."""
    text = "line\n\ttab, é, 日本"
    given: dict[str, Any] = {"a": {"b": (1, 2.5, None, True, text), "c": -LARGEST}, "d": [LARGEST - 1]}
    copied, _ = load_config(given)
    assert copied == {**given, "a": {**given["a"], "b": list(given["a"]["b"])}}
    copied["a"]["c"] = 0
    assert given["a"]["c"] == -LARGEST


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("a\0b", r"contains '\x00'"),
        ("\x1b[2J", r"contains '\x1b'"),
        ("\x9b2J", r"contains '\x9b'"),
        ("over\rwritten", r"contains '\r'"),
        ("\ud800", r"contains '\ud800'"),
        (LARGEST, "more than 64 bits"),
        (-LARGEST - 1, "more than 64 bits"),
        pytest.param(10**10_000, "more than 64 bits", id="huge"),
        ({3: 1}, "expected a key that is a word, got 3 (int)"),
        ({None: 1}, "expected a key that is a word"),
        ({"a\n": 1}, "invalid key"),
        ({"k" * 201: 1}, "at most 200 characters"),
    ],
)
def test_values_out_of_bounds_are_rejected(value: Any, problem: str) -> None:
    """The error has the value's dotted path, and is printable."""
    with pytest.raises(ConfigError) as caught:
        load_config({"hooks": {"forward": [1, value]}})
    assert caught.value.path == "hooks.forward.1"
    assert problem in caught.value.problem
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300


@pytest.mark.parametrize("tree", [{"a": [0] * 10_000}, {"a": {"b": [[0] * 99] * 102}}])
def test_too_many_values_are_rejected(tree: Any) -> None:
    """A shared value counts at every place where it occurs."""
    with pytest.raises(ConfigError, match="config: is too large"):
        load_config(tree)


def test_too_many_levels_are_rejected() -> None:
    """A value that contains itself is reported as too deep."""
    tree: dict[str, Any] = {}
    tree["a"] = tree
    with pytest.raises(ConfigError, match="more than 50 levels"):
        load_config(tree)
