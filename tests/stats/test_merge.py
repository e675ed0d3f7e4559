"""Rows of parts give the row of the whole."""

from collections.abc import Callable
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline.stats import summarize
from hookline.stats.rows import merge


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, 200), max_size=5), mean=st.floats(-1e4, 1e4))
def test_any_cuts_give_the_whole(cuts: list[int], mean: float, assert_rows: Callable[..., None]) -> None:
    """However a tensor is cut, empty parts included, the merged row is its own."""
    whole = torch.randn(200, dtype=torch.float64, generator=torch.Generator().manual_seed(len(cuts))) + mean
    places = [0, *sorted(cuts), 200]
    parts = [whole[start:end] for start, end in pairwise(places)]
    assert_rows(merge(summarize(parts)).unsqueeze(0), [whole])


def test_many_tensors_are_merged_at_once(assert_rows: Callable[..., None]) -> None:
    """Rows of several tensors from several ranks are merged side by side."""
    tensors = [torch.randn(40), torch.randn(60) + 5, torch.randn(10).relu()]
    ranks = [[tensor[rank::2] for tensor in tensors] for rank in range(2)]
    assert_rows(merge(torch.stack([summarize(shards) for shards in ranks])), tensors)


def test_a_nan_in_one_part_shows_in_the_whole(assert_rows: Callable[..., None]) -> None:
    """NaN and infinities come through, with their counts."""
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([float("nan")]), torch.tensor([float("inf"), 0.0])]
    assert_rows(merge(summarize(parts)).unsqueeze(0), [torch.cat(parts)])
    assert_rows(merge(summarize(parts[::2])).unsqueeze(0), [torch.cat(parts[::2])])


def test_empty_parts_make_an_empty_whole(assert_rows: Callable[..., None]) -> None:
    """The row of nothing is that of an empty tensor."""
    assert_rows(merge(summarize([torch.empty(0), torch.empty(0)])).unsqueeze(0), [torch.empty(0)])
