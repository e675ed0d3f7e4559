"""YAML from strangers."""

import time
from typing import Any

import pytest

from hookline.config.yaml_text import MAX_DEPTH, read_yaml
from hookline.errors import ConfigError

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)
MERGE_BOMB = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 12)
)


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
        ("a: [1, true, null, x]", {"a": [1, True, None, "x"]}),
        ("", None),
    ],
)
def test_values(text: str, value: Any) -> None:
    """Plain values are read as everybody means them, numbers like 5e-3 included."""
    read = read_yaml(text, "x.yaml")
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: !!python/object/apply:os.system [ls]", "line 1: the tag '!!python/object/apply:os.system' is refused"),
        ("a: !mine 3", "the tag '!mine' is refused"),
        ("a: 1\nb: 2\na: 3", "line 3: the key 'a' is there twice (first in line 1)"),
        ("{a: 1, a: 2}", "twice"),
        ("&a [*a]", "contains itself"),
        ("[" * 5000, f"deeper than {MAX_DEPTH}"),
        (BOMB, "aliases"),
        (MERGE_BOMB, "aliases"),
        ("a: [1", "is no valid YAML"),
        ("a: 1\n---\nb: 2", "is no valid YAML"),
        ("? [1]\n: 2", "is no valid YAML"),
    ],
)
def test_refusals(text: str, words: str) -> None:
    """Tags, doubled keys, bombs, cycles and broken text are one clear error each, and quickly."""
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        read_yaml(text, "x.yaml")
    assert caught.value.path == "x.yaml"
    assert words in caught.value.problem
    assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 2


def test_aliases_and_merges_work() -> None:
    """Anchors are fine within reason; a merge may be overridden without counting as a doubled key."""
    assert read_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}", "x")["b"] == {"x": 3, "y": 2}
