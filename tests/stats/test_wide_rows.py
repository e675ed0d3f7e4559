"""Rows with histograms behind their statistics say what both say alone, also when they are merged."""

import torch

from hookline.stats.columns import STATISTICS
from hookline.stats.histograms import BINS, histograms
from hookline.stats.merging import merge
from hookline.stats.statistics import summarize
from hookline.stats.wide_rows import histograms_of, measure_with_histograms, merge_rows


def test_both_are_in_a_row() -> None:
    """Statistics first, then the histogram, the same as each by itself."""
    tensors = [torch.randn(50), torch.randn(3, 4).bfloat16()]
    rows = measure_with_histograms(tensors)
    counted = histograms(tensors)
    assert rows.shape == (2, len(STATISTICS) + BINS + 1)
    assert torch.equal(rows[:, : len(STATISTICS)], summarize(tensors))
    assert torch.equal(histograms_of(rows).counts, counted.counts)
    assert torch.equal(histograms_of(rows).tops, counted.tops)


def test_merging_wide_and_narrow_rows() -> None:
    """The parts' rows give the whole's row; a narrow one stays narrow."""
    parts = [torch.randn(40) * 5, torch.randn(60) - 1]
    wide = torch.stack([measure_with_histograms([part]) for part in parts])
    whole = measure_with_histograms([torch.cat(parts)])
    torch.testing.assert_close(merge_rows(wide), whole, rtol=1e-5, atol=1e-6)
    narrow = torch.stack([summarize([part]) for part in parts])
    assert torch.equal(merge_rows(narrow), merge(narrow))
