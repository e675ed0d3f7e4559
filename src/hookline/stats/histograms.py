"""Count the values of many tensors in signed, logarithmic bins, on their device, and read percentiles from the counts.

Each tensor has its own range, which ends above the largest absolute value; `hookline._bins` describes the bins in it.
A tensor with NaN or infinities has no largest value to start from; its range ends at 2^16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hookline import _device
from hookline._bins import BINS, PER_OCTAVE, PER_SIGN
from hookline.stats.rows import ABSMAX, STATISTICS, has_kernels, merge, row_dtype, summarize, wide_dtype

ZERO, INFINITE, NOT_A_NUMBER = PER_SIGN + 1, BINS - 2, BINS - 1
USUAL_TOP, HIGHEST_TOP = 15.0, 127.0  # octaves
LOWEST_TOP = -90.0  # octave; the range stays clear of float32's subnormal numbers
_PIECE = 1 << 20  # number of elements that are counted at once, to keep the memory for indices small


class Histograms(NamedTuple):
    """The counts, [tensors, bins] as int64, and for each tensor the octave in which its range ends."""

    counts: Tensor
    tops: Tensor


def histograms(tensors: Sequence[Tensor], rows: Tensor | None = None) -> Histograms:
    """Count the values of each tensor, exactly and without waiting for the device.

    Args:
        tensors: Tensors as `summarize` takes them.
        rows: What `summarize` returned for them, which saves one read.
    """
    if not tensors:
        return Histograms(torch.zeros((0, BINS), dtype=torch.int64), torch.zeros(0))
    tops = tops_of(summarize(tensors) if rows is None else rows)
    return Histograms(count(tensors, tops), tops)


def count(tensors: Sequence[Tensor], tops: Tensor) -> Tensor:
    """Return the counts of each tensor, [tensors, bins], in ranges that end with the octaves `tops`."""
    with torch.no_grad():
        if has_kernels(tops.device):
            from hookline.stats import cuda

            return cuda.count(tensors, tops)
        counts = torch.zeros((len(tensors), BINS), dtype=torch.int64, device=tops.device)
        for tensor, top, row in zip(tensors, tops, counts, strict=True):
            for piece in torch.split(tensor.reshape(-1), _PIECE):
                bins = _bins_of(piece.to(wide_dtype(piece.dtype)), top)
                row.index_add_(0, bins, torch.ones_like(bins))
        return counts


def _bins_of(values: Tensor, top: Tensor) -> Tensor:
    below_top = (top + 1 - values.abs().log2()) * PER_OCTAVE
    places = below_top.clamp(0, PER_SIGN - 1).nan_to_num().long()
    bins = torch.where(values < 0, 1 + places, 2 * PER_SIGN + 1 - places)
    bins = bins.masked_fill(values == 0, ZERO).masked_fill(values.isnan(), NOT_A_NUMBER)
    return bins.masked_fill(values == float("inf"), INFINITE).masked_fill(values == float("-inf"), 0)


def tops_of(rows: Tensor) -> Tensor:
    """Return the octave in which each tensor's range ends, from its statistics row."""
    absmax = rows[..., ABSMAX]
    octaves = torch.frexp(absmax).exponent - 1  # exact; a logarithm may end up just below a power of two
    return torch.where(absmax.isfinite(), octaves.float().clamp(LOWEST_TOP, HIGHEST_TOP), USUAL_TOP)


def percentiles(counted: Histograms, points: Sequence[float]) -> Tensor:
    """Return percentiles of each tensor's values, [tensors, points], within 5 % of `torch.quantile`.

    As there, a position between two values is interpolated, and a NaN in the tensor makes all of them NaN. The bound
    holds for values in the range; smaller ones become its lower end. Nothing waits for the device.
    """
    counts, tops, device = *counted, counted.counts.device
    fractions = _device.cached_table(device, tuple(point / 100 for point in points), row_dtype(device))
    # The bins of the two values around each position are interpolated.
    numbers = counts[:, :NOT_A_NUMBER].cumsum(dim=1)
    total = numbers[:, -1:]
    places = fractions * (total - 1).clamp(min=0)
    below = torch.searchsorted(numbers, places.floor().long(), right=True)
    above = torch.searchsorted(numbers, places.ceil().long(), right=True)
    values = values_of_bins(tops)
    lower, upper = (values.gather(1, bins.clamp(max=INFINITE)) for bins in (below, above))
    between = torch.where(below == above, lower, lower + (upper - lower) * (places - places.floor()))
    return between.masked_fill((counts[:, NOT_A_NUMBER:] > 0) | (total == 0), float("nan"))


def values_of_bins(tops: Tensor, per_octave: int = PER_OCTAVE) -> Tensor:
    """Return the value that represents each bin except that of NaN: its middle on the logarithmic scale.

    The result is [tensors, bins - 1], increasing along each row; `per_octave` is what the counts were folded to.
    """
    places = torch.arange(_per_sign(per_octave), device=tops.device, dtype=row_dtype(tops.device))
    sizes = torch.exp2(tops.to(places.dtype).unsqueeze(1) + 1 - (places + 0.5) / per_octave)
    ends = torch.full_like(sizes[:, :1], float("inf"))
    return torch.cat([-ends, -sizes, torch.zeros_like(ends), sizes.flip(1), ends], dim=1)


def fold(counts: Tensor, per_octave: int) -> Tensor:
    """Return the same counts in fewer bins: 1, 2 or 4 per octave and sign instead of 8, in the same order."""
    together, groups = PER_OCTAVE // per_octave, _per_sign(per_octave)
    if together == 1:
        return counts
    negative, positive = counts[:, 1:ZERO], counts[:, ZERO + 1 : INFINITE]
    short = groups * together - PER_SIGN  # The last group, which has the smallest magnitudes, is not full.
    negative = torch.nn.functional.pad(negative, (0, short)).view(-1, groups, together).sum(dim=2)
    positive = torch.nn.functional.pad(positive, (short, 0)).view(-1, groups, together).sum(dim=2)
    return torch.cat([counts[:, :1], negative, counts[:, ZERO : ZERO + 1], positive, counts[:, INFINITE:]], dim=1)


def _per_sign(per_octave: int) -> int:
    return -(-PER_SIGN * per_octave // PER_OCTAVE)


def has_range(counts: Tensor) -> Tensor:
    """Return which histograms, [..., bins], have values whose bins depend on the range: others than zeros and NaN."""
    return counts.sum(-1) > counts[..., ZERO] + counts[..., NOT_A_NUMBER] + counts[..., 0] + counts[..., INFINITE]


def move_ranges(counts: Tensor, tops: Tensor, top: Tensor) -> Tensor:
    """Return histograms, [..., bins], as counted in ranges that end with the octave `top`, which is not below `tops`.

    Ranges end at whole octaves, so the bins of a lower range coincide with those of a higher one and move without
    loss; values below the range count in the smallest bin, as they would have from the start.
    """
    shift = ((top - tops) * PER_OCTAVE).nan_to_num(0.0, 0.0, 0.0).long().clamp(0, PER_SIGN).unsqueeze(-1)
    bins = torch.arange(BINS, device=counts.device)
    negative, positive = (bins > 0) & (bins < ZERO), (bins > ZERO) & (bins < INFINITE)
    target = torch.where(negative, (bins + shift).clamp(max=PER_SIGN), bins)
    target = torch.where(positive, (bins - shift).clamp(min=ZERO + 1), target)
    return torch.zeros_like(counts).scatter_add_(-1, target, counts)


# ---- rows that carry a histogram behind their statistics, so that both are copied and merged together ----------------
# The columns are those of `STATISTICS`, then one for each bin, then the octave in which the range ends.


def summarize_with_histograms(tensors: Sequence[Tensor], names: Sequence[object] | None = None) -> Tensor:
    """Return one row per tensor with its statistics and its histogram, on the tensors' device; nothing waits for it."""
    rows = summarize(tensors, names)
    counts, tops = histograms(tensors, rows)
    return torch.cat([rows, counts.to(rows.dtype), tops.to(rows.dtype).unsqueeze(1)], dim=1)


def merge_rows(parts: Tensor) -> Tensor:
    """Merge rows as `merge` does, with or without histograms after the statistics: [parts, wholes, columns]."""
    columns = len(STATISTICS)
    merged = merge(parts[..., :columns])
    if parts.shape[-1] == columns:
        return merged
    counts, tops = parts[..., columns:-1], parts[..., -1]
    ranged = has_range(counts)
    top = torch.where(ranged, tops, float("-inf")).amax(0)
    top = torch.where(ranged.any(0), top, tops_of(merged).to(tops.dtype))
    return torch.cat([merged, move_ranges(counts, tops, top).sum(0), top.unsqueeze(-1)], dim=-1)


def histograms_in(rows: Tensor) -> Histograms:
    """Return the histograms in rows of `summarize_with_histograms`."""
    return Histograms(rows[:, len(STATISTICS) : -1].long(), rows[:, -1].float())
