"""Numbers become text and come back as they were; what is damaged is noticed."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hookline.record.packing import pack, pack_counts, unpack, unpack_counts

COUNTS = st.one_of(st.just(0), st.integers(0, 300), st.integers(0, 2**24), st.sampled_from([127, 128, 16383, 16384]))


def packed(values: np.ndarray[Any, Any], binned: bool = True) -> dict[str, Any]:
    """A line of the record."""
    field, text = pack(values, binned)
    return {field: text.decode("ascii")}


@given(st.lists(COUNTS, max_size=60))
def test_counts_come_back(counts: list[int]) -> None:
    """Whatever they are, in whatever number."""
    values = np.array(counts, dtype=np.float32)
    line = packed(values)
    assert list(line) == ["counts"]
    found = unpack(line, len(counts))
    assert found is not None and found.dtype == np.float32 and found.tolist() == counts


def test_how_counts_are_packed() -> None:
    """Ten bits for ten bins, then seven bits of a count to the byte, the lowest of all counts first."""
    values = np.array([0, 5, 0, 0, 127, 128, 0, 0, 0, 300], dtype=np.float32)
    assert pack_counts(values) == bytes([0b01001100, 0b01000000, 5, 127, 128, 128 + 300 % 128, 1, 300 // 128])


def test_histograms_take_a_fifth_of_their_floats() -> None:
    """148 of them, with the numbers of elements that GPT-2 small has, fit into 100 kB of text instead of 404."""
    stream = np.random.default_rng(0)
    sizes = [50304 * 768, 1024 * 768, *[768, 768, 768, 768, 2304, 768 * 2304, 3072, 768 * 768] * 18, 768, 768]
    bins = np.exp2(-np.abs(np.arange(512) - 255.5) / 8)[::-1].copy()
    shares = np.roll(bins, 256) / bins.sum()  # half as many values in each octave further down, on both sides
    values = np.stack([stream.poisson(size * shares) for size in sizes]).astype(np.float32)
    assert len(packed(values)["counts"]) < 100_000 < 404_000 < len(packed(values, binned=False)["data"])


@pytest.mark.parametrize("odd", [0.5, -1.0, float("nan"), float("inf"), -float("inf"), 2.0**31, 1e-40, 1e30])
def test_what_is_no_count_stays_a_float(odd: float) -> None:
    """One such value is enough, and all come back."""
    values = np.array([0.0, 3.0, odd], dtype=np.float32)
    assert pack_counts(values) is None
    line = packed(values)
    assert list(line) == ["data"]
    np.testing.assert_array_equal(unpack(line, 3), values)


@settings(max_examples=50)
@given(arrays.arrays(np.float32, st.integers(0, 20)))
def test_floats_come_back_bit_for_bit(values: np.ndarray[Any, Any]) -> None:
    """Those of a table without bins are never taken for counts."""
    found = unpack(packed(values, binned=False), values.size)
    assert found is not None and found.tobytes() == values.tobytes()


@settings(max_examples=200)
@given(st.binary(max_size=12), st.integers(0, 40))
def test_damage_never_raises(noise: bytes, size: int) -> None:
    """Bytes of any kind are so many counts, or nothing."""
    found = unpack_counts(noise, size)
    assert found is None or (found.size == size and (found >= 0).all())


def test_damage_is_noticed() -> None:
    """A byte too few or too many, another size, a count that never ends, text that is no text of ours."""
    whole = pack_counts(np.array([1, 200, 0, 70000], dtype=np.float32))
    assert whole is not None and unpack_counts(whole, 4) is not None
    assert unpack_counts(whole[:-1], 4) is None and unpack_counts(whole + b"\0", 4) is None
    assert unpack_counts(whole, 40) is None and unpack_counts(b"", 4) is None
    assert unpack_counts(bytes([128] * 8), 1) is None
    for record in ({}, {"counts": "?"}, {"counts": 5}, {"data": "AAA="}, {"data": "AACAPw=="}):
        assert unpack(record, 4) is None
