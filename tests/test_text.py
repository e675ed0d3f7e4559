"""Texts that commands, reports and the live view share."""

import pytest

from hookline._text import counted, duration_text, first_of


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0.0 s"), (4.2, "4.2 s"), (59.94, "59.9 s"), (59.96, "1 m 00 s"), (75, "1 m 15 s"), (3599.6, "1 h 00 m"),
     (3725, "1 h 02 m"), (86_400, "1 d 00 h"), (200_000, "2 d 07 h")],
)  # fmt: skip
def test_a_duration_has_its_two_largest_units(seconds: float, expected: str) -> None:
    assert duration_text(seconds) == expected


@pytest.mark.parametrize(
    ("count", "noun", "expected"),
    [(0, "step", "0 steps"), (1, "batch", "1 batch"), (100_000, "batch", "100,000 batches")],
)
def test_a_count_has_its_noun(count: int, noun: str, expected: str) -> None:
    assert counted(count, noun) == expected


@pytest.mark.parametrize(
    ("most", "expected"), [(1, "a and 2 more"), (2, "a, b and 1 more"), (3, "a, b, c"), (9, "a, b, c")]
)
def test_what_is_not_listed_is_counted(most: int, expected: str) -> None:
    assert first_of(["a", "b", "c"], most) == expected
