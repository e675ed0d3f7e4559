"""Histograms count every value once, and percentiles read from them are within five percent."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hookline.stats.histograms import (
    BINS,
    INFINITE,
    NOT_A_NUMBER,
    PER_OCTAVE,
    ZERO,
    Histograms,
    fold,
    histograms,
    percentiles,
    values_of_bins,
)

POINTS = [0, 10, 25, 50, 90, 99.5, 100]


def quantiles(tensor: Tensor) -> Tensor:
    """What torch says."""
    wide = tensor.double().reshape(-1)
    return torch.quantile(wide, torch.tensor(POINTS, dtype=torch.float64) / 100)


def test_every_value_is_counted_once(awkward_tensors: Callable[[], list[Tensor]]) -> None:
    """The bins of each tensor add up to its size."""
    tensors = awkward_tensors()
    counts = histograms(tensors).counts
    assert counts.shape == (len(tensors), BINS)
    assert counts.sum(dim=1).tolist() == [tensor.numel() for tensor in tensors]


def test_special_values_have_bins_of_their_own() -> None:
    """Zero, the two infinities and NaN are told apart."""
    counts = histograms([torch.tensor([0.0, -0.0, math.inf, -math.inf, -math.inf, math.nan, 1.0])]).counts[0]
    assert [int(counts[place]) for place in (0, ZERO, INFINITE, NOT_A_NUMBER)] == [2, 2, 1, 1]


def test_bins_are_an_eighth_of_an_octave_and_ordered() -> None:
    """Rising values never fall back a bin, and a factor of two is eight bins."""
    values = torch.cat([-torch.logspace(3, -3, 500), torch.zeros(1), torch.logspace(-3, 3, 500)])
    places = [int(row.nonzero()) for row in histograms(list(values), torch.full((1001, 10), 1000.0)).counts]
    assert places == sorted(places)
    one, two = histograms([torch.tensor([1.5]), torch.tensor([3.0])], torch.full((2, 10), 1000.0)).counts
    assert int(two.nonzero()) - int(one.nonzero()) == PER_OCTAVE


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1.0, 1e15])
@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_percentiles_of_smooth_values(scale: float, shift: float) -> None:
    """Normal values at any scale, around zero or not; near zero the error is small against the spread."""
    tensor = (torch.randn(50_001, generator=torch.Generator().manual_seed(0)) + shift) * scale
    found = percentiles(histograms([tensor]), POINTS)[0]
    torch.testing.assert_close(found, quantiles(tensor), rtol=0.05, atol=1e-6 * scale)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.floats(2.0**-10, 2.0**10), min_size=1, max_size=30), st.booleans())
def test_percentiles_of_any_values(values: list[float], negative: bool) -> None:
    """A few values of one sign, far apart or equal: interpolated as torch does, within five percent."""
    tensor = torch.tensor(values) * (-1 if negative else 1)
    torch.testing.assert_close(percentiles(histograms([tensor]), POINTS)[0], quantiles(tensor), rtol=0.05, atol=0)


def test_percentiles_of_what_has_none() -> None:
    """NaN inside, or nothing at all, makes them NaN; zeros are zero; infinities stand at the ends."""
    tensors = [torch.tensor([1.0, math.nan]), torch.empty(0), torch.zeros(5), torch.tensor([-math.inf, 1.0, math.inf])]
    found = percentiles(histograms(tensors), [0, 50, 100])
    assert found[:2].isnan().all() and found[2].tolist() == [0, 0, 0]
    assert found[3, 0] == -math.inf and found[3, 2] == math.inf and found[3, 1].item() == pytest.approx(1, rel=0.05)


def test_float64_keeps_its_range() -> None:
    """Values beyond float32 are neither infinite nor zero."""
    counts = histograms([torch.tensor([1e300, 1e-300], dtype=torch.float64)]).counts[0]
    assert not counts[[0, ZERO, INFINITE, NOT_A_NUMBER]].any()


def test_no_tensors_give_no_histograms() -> None:
    """An empty list is no error."""
    assert histograms([]).counts.shape == (0, BINS)
    assert percentiles(Histograms(*histograms([])), [50]).shape == (0, 1)


@pytest.mark.parametrize("per_octave", [1, 2, 4, 8])
def test_fewer_bins_hold_the_same_counts(per_octave: int) -> None:
    """Folded counts are those of the wider bins, each value still in a bin whose middle is near it."""
    values = torch.cat([torch.randn(5000), torch.zeros(3), torch.tensor([math.inf, -math.inf, math.nan])])
    counted = histograms([values[:5003], values])
    folded = fold(counted.counts, per_octave)
    assert folded.sum(dim=1).tolist() == [5003, 5006]
    assert folded.shape[1] == values_of_bins(counted.tops, per_octave).shape[1] + 1
    middles = values_of_bins(counted.tops, per_octave)[0]
    assert (middles.diff() > 0).all() and middles[len(middles) // 2] == 0
    mean = (folded[0, 1:-2] * middles[1:-1].abs()).sum() / 5003
    assert mean.item() == pytest.approx(values[:5003].abs().mean().item(), rel=0.2 / per_octave)
    assert folded[1, [0, -2, -1]].tolist() == [1, 1, 1]
