"""Test that every value becomes strict JSON and that nothing raises."""

import dataclasses
import enum
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hookline.record.strict_json import dumps


def strictly(text: str) -> Any:
    """Parse as a strict reader does: NaN is not JSON, and a key appears once."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in pairs}) == len(pairs), "a key appears twice"
        return dict(pairs)

    text.encode("ascii")
    return json.loads(text, parse_constant=refuse, object_pairs_hook=unique)


class Colour(enum.Enum):
    """An enum with text and one without."""

    RED = "red"
    TWO = 2


class Level(enum.IntEnum):
    """An enum that is also a number."""

    HIGH = 3


@dataclasses.dataclass
class Point:
    """A dataclass."""

    x: int
    where: Path


class Hostile:
    """An object whose repr and attributes raise."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("no attribute")


def cycle() -> list[Any]:
    """Make a list that contains itself."""
    items: list[Any] = [1]
    items.append(items)
    return items


def deep() -> list[Any]:
    """Make a list deeper than the interpreter's stack."""
    items: list[Any] = []
    for _ in range(5000):
        items = [items]
    return items


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), "NaN"),
        ({"a": float("inf"), "b": -float("inf")}, {"a": "Infinity", "b": "-Infinity"}),
        (torch.device("cuda", 1), "cuda:1"),
        (torch.bfloat16, "bfloat16"),
        (Path("a/b"), "a/b"),
        ([Colour.RED, Colour.TWO, Level.HIGH], ["red", "TWO", "HIGH"]),
        (torch.tensor(2), 2),
        (torch.tensor(float("nan")), "NaN"),
        (torch.tensor(1.5, dtype=torch.bfloat16, requires_grad=True), 1.5),
        (torch.zeros(2, 3), {"tensor": {"shape": [2, 3], "dtype": "float32"}}),
        (torch.zeros((), device="meta"), {"tensor": {"shape": [], "dtype": "float32"}}),
        (np.float32(0.5), 0.5),
        (np.float64("nan"), "NaN"),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.zeros((2, 2)), {"array": {"shape": [2, 2], "dtype": "float64"}}),
        ({3, 1, 10}, [1, 3, 10]),
        (frozenset({"b", "a"}), ["a", "b"]),
        (Point(1, Path("x")), {"x": 1, "where": "x"}),
        (OrderedDict(a=(1, 2)), {"a": [1, 2]}),
        ({1: "a", "1": "b", None: 0, False: 5}, {"1": "a", "1#2": "b", "null": 0, "false": 5}),
        ({(1, 2): 3}, {"[1,2]": 3}),
        ("lone \ud800", "lone \\ud800"),
        ({"k": "\udc80"}, {"k": "\\udc80"}),
        ({"smile": "\U0001f600"}, {"smile": "\U0001f600"}),
        (10**30, 10**30),
    ],
)
def test_values_have_one_strict_form(value: Any, expected: Any) -> None:
    """Each kind of value has its documented JSON form."""
    assert strictly(dumps(value)) == expected


@pytest.mark.parametrize(
    "value",
    [
        cycle(), deep(), Hostile(), {"h": Hostile()}, {Hostile: 1}, 10**5000, {10**5000: 10**5000}, object(), Point,
        torch.zeros(2).to_sparse(), np.datetime64("2020-01-01"), np.longdouble(1), np.array(["a"], dtype=object),
        1 + 2j, torch.tensor(1j), b"\xff", lambda: 0, float, range(3), memoryview(b"x"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_nothing_raises(value: Any) -> None:
    """Cycles, deep nesting, huge integers and hostile objects get a text like everything else."""
    strictly(dumps(value))
    strictly(dumps(value, indent=2))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers() | st.none(), inner),
        max_leaves=12,
    )
)
def test_any_tree_is_strict_json(value: Any) -> None:
    """Whatever the tree, the text parses strictly and is on one line."""
    text = dumps(value)
    strictly(text)
    assert "\n" not in text


@given(st.dictionaries(st.text(), st.integers() | st.floats(allow_nan=False, allow_infinity=False)))
def test_flat_records_come_back_equal(record: dict[str, Any]) -> None:
    """The fast path changes no number and no name."""
    assert strictly(dumps(record)) == record


def test_a_long_repr_is_shortened() -> None:
    """A repr of a megabyte does not end up in the record."""
    assert len(dumps({"b": b"x" * 10**6})) < 250
    assert len(dumps({"r": range(10**250)})) < 500
