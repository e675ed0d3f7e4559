"""Histograms of parts give the histogram of the whole, whatever window each had."""

import torch

from hookline.stats.histogram_merging import merge_histograms
from hookline.stats.histograms import BINS, INFINITE, NOT_A_NUMBER, ZERO, Histograms, histograms, percentiles


def merged(parts: list[torch.Tensor]) -> Histograms:
    """The parts' histograms put together, as those of one tensor."""
    counted = histograms(parts)
    counts, tops = merge_histograms(counted.counts.double().unsqueeze(1), counted.tops.double().unsqueeze(1))
    return Histograms(counts.long(), tops.float())


def test_windows_of_different_height() -> None:
    """Parts whose largest values lie octaves apart give exactly what the whole gives."""
    parts = [torch.randn(1000) * scale for scale in (1e-3, 1.0, 300.0)]
    whole = histograms([torch.cat(parts)])
    assert torch.equal(merged(parts).counts, whole.counts)
    assert torch.equal(merged(parts).tops, whole.tops)


def test_what_falls_out_below_is_counted_in_the_smallest_bins() -> None:
    """Values 60 octaves below the highest end where the whole would have put them."""
    parts = [torch.tensor([1e-15, -2e-15, 3e-15]), torch.tensor([1000.0, -1000.0])]
    found = merged(parts).counts[0]
    assert torch.equal(found, histograms([torch.cat(parts)]).counts[0])
    assert (found[ZERO + 1], found[ZERO - 1], found.sum()) == (2, 1, 5)


def test_zeros_infinities_and_nans_stay_where_they_are() -> None:
    """Only magnitudes move; a part that is not finite keeps its own top."""
    parts = [torch.tensor([0.0, 1.0, float("inf")]), torch.tensor([0.0, float("nan"), float("-inf"), 2.0])]
    found = merged(parts).counts[0]
    assert (found[ZERO], found[INFINITE], found[0], found[NOT_A_NUMBER]) == (2, 1, 1, 1)
    assert found.sum() == 7


def test_empty_parts_count_for_nothing() -> None:
    """An empty part neither counts nor raises the window; all of them empty is an empty whole."""
    full = torch.randn(100) * 1e-6
    assert torch.equal(merged([torch.empty(0), full]).counts, histograms([full]).counts)
    assert merged([torch.empty(0), torch.empty(0)]).counts.tolist() == [[0] * BINS]


def test_percentiles_of_the_whole() -> None:
    """What is read from the merged counts is within 5 % of torch's for all values together."""
    parts = [torch.randn(5000) + 3, torch.randn(5000) * 10]
    points = [1, 10, 50, 90, 99]
    found = percentiles(merged(parts), points)[0]
    true = torch.quantile(torch.cat(parts).double(), torch.tensor(points, dtype=torch.float64) / 100)
    torch.testing.assert_close(found, true, rtol=0.05, atol=0.02)
