"""Histograms count every value once, and percentiles read from them are within five percent."""

import math
from collections.abc import Callable

import pytest
import torch
from builders import make_trainer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hookline import read_layers
from hookline.stats import histograms as bins
from hookline.stats.histograms import Histograms, fold, histograms, percentiles, values_of_bins

POINTS = [0, 10, 25, 50, 90, 99.5, 100]


def quantiles(tensor: Tensor) -> Tensor:
    """What torch says."""
    wide = tensor.double().reshape(-1)
    return torch.quantile(wide, torch.tensor(POINTS, dtype=torch.float64) / 100)


def test_every_value_is_counted_once(awkward_tensors: Callable[[], list[Tensor]]) -> None:
    """The bins of each tensor add up to its size."""
    tensors = awkward_tensors()
    counts = histograms(tensors).counts
    assert counts.shape == (len(tensors), bins.BINS)
    assert counts.sum(dim=1).tolist() == [tensor.numel() for tensor in tensors]


def test_special_values_have_bins_of_their_own() -> None:
    """Zero, the two infinities and NaN have different bins."""
    counts = histograms([torch.tensor([0.0, -0.0, math.inf, -math.inf, -math.inf, math.nan, 1.0])]).counts[0]
    assert [int(counts[place]) for place in (0, bins.ZERO, bins.INFINITE, bins.NOT_A_NUMBER)] == [2, 2, 1, 1]


def test_bins_are_an_eighth_of_an_octave_and_ordered() -> None:
    """Rising values never fall back a bin, and a factor of two is eight bins."""
    values = torch.cat([-torch.logspace(3, -3, 500), torch.zeros(1), torch.logspace(-3, 3, 500)])
    places = [int(row.nonzero()) for row in histograms(list(values), torch.full((1001, 10), 1000.0)).counts]
    assert places == sorted(places)
    one, two = histograms([torch.tensor([1.5]), torch.tensor([3.0])], torch.full((2, 10), 1000.0)).counts
    assert int(two.nonzero()) - int(one.nonzero()) == bins.PER_OCTAVE


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


def test_percentiles_that_do_not_exist() -> None:
    """NaN inside, or nothing at all, makes them NaN; zeros are zero; infinities stand at the ends."""
    tensors = [torch.tensor([1.0, math.nan]), torch.empty(0), torch.zeros(5), torch.tensor([-math.inf, 1.0, math.inf])]
    found = percentiles(histograms(tensors), [0, 50, 100])
    assert found[:2].isnan().all() and found[2].tolist() == [0, 0, 0]
    assert found[3, 0] == -math.inf and found[3, 2] == math.inf and found[3, 1].item() == pytest.approx(1, rel=0.05)


def test_float64_keeps_its_range() -> None:
    """Values beyond float32 are neither infinite nor zero."""
    counts = histograms([torch.tensor([1e300, 1e-300], dtype=torch.float64)]).counts[0]
    assert not counts[[0, bins.ZERO, bins.INFINITE, bins.NOT_A_NUMBER]].any()


def test_no_tensors_give_no_histograms() -> None:
    """An empty list is valid."""
    assert histograms([]).counts.shape == (0, bins.BINS)
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


# ---- merging ---------------------------------------------------------------------------------------------------------


class Parts(nn.Module):
    """A model that calls one module once with each part in every forward pass."""

    def __init__(self, parts: list[Tensor]) -> None:
        super().__init__()
        self.parts, self.part, self.weight = parts, nn.Identity(), nn.Parameter(torch.ones(1))

    def forward(self, inputs: Tensor) -> Tensor:
        for part in self.parts:
            self.part(part)
        return inputs * self.weight


def merged(parts: list[Tensor]) -> Histograms:
    """Return the histogram that a monitor records for a step in which a module was called with each part."""
    trainer = make_trainer(model=Parts(parts), data=[(torch.ones(1), torch.ones(1))], record=True)
    trainer.add_hook("monitor", modules="part", metrics=["count", "histogram"])
    trainer.train()
    assert trainer.run_dir is not None
    series = read_layers(trainer.run_dir)
    assert series["activations"].of("part", "count").tolist() == [sum(part.numel() for part in parts)]
    counts = series["activation_histograms"].of("part", "counts")
    return Histograms(counts.long(), series["activations"].of("part", "histogram_top").float())


def test_one_part_has_its_own_histogram() -> None:
    """What a monitor records is what is counted from the tensor."""
    part = torch.randn(3, 4).bfloat16()
    found, whole = merged([part]), histograms([part])
    assert torch.equal(found.counts, whole.counts) and torch.equal(found.tops, whole.tops)


def test_windows_of_different_height() -> None:
    """Parts whose largest values lie octaves apart give exactly what the whole gives."""
    parts = [torch.randn(1000) * scale for scale in (1e-3, 1.0, 300.0)]
    whole = histograms([torch.cat(parts)])
    found = merged(parts)
    assert torch.equal(found.counts, whole.counts) and torch.equal(found.tops, whole.tops)


def test_values_below_the_window_count_in_the_smallest_bins() -> None:
    """Values 60 octaves below the highest end where the whole would have put them."""
    parts = [torch.tensor([1e-15, -2e-15, 3e-15]), torch.tensor([1000.0, -1000.0])]
    found = merged(parts).counts[0]
    assert torch.equal(found, histograms([torch.cat(parts)]).counts[0])
    assert (found[bins.ZERO + 1], found[bins.ZERO - 1], found.sum()) == (2, 1, 5)


def test_zeros_infinities_and_nans_stay_where_they_are() -> None:
    """Only magnitudes move; a part that is not finite keeps its own top."""
    parts = [torch.tensor([0.0, 1.0, float("inf")]), torch.tensor([0.0, float("nan"), float("-inf"), 2.0])]
    found = merged(parts).counts[0]
    assert (found[bins.ZERO], found[bins.INFINITE], found[0], found[bins.NOT_A_NUMBER]) == (2, 1, 1, 1)
    assert found.sum() == 7


def test_empty_parts_count_for_nothing() -> None:
    """An empty part neither counts nor raises the range; all of them empty is an empty whole."""
    full = torch.randn(100) * 1e-6
    assert torch.equal(merged([torch.empty(0), full]).counts, histograms([full]).counts)
    assert merged([torch.empty(0), torch.empty(0)]).counts.tolist() == [[0] * bins.BINS]


def test_percentiles_of_the_whole() -> None:
    """What is read from the merged counts is within 5 % of torch's for all values together."""
    parts = [torch.randn(5000) + 3, torch.randn(5000) * 10]
    points = [1, 10, 50, 90, 99]
    found = percentiles(merged(parts), points)[0]
    true = torch.quantile(torch.cat(parts).double(), torch.tensor(points, dtype=torch.float64) / 100)
    torch.testing.assert_close(found, true, rtol=0.05, atol=0.02)
