"""Histograms of many tensors at once, log-spaced and signed, on their device, and percentiles from them.

Each tensor has its own window: it ends above its largest absolute value and reaches 31 octaves down, eight bins to the
octave and sign. The bins stand in the order of the values:

    0        -inf
    1…254    negative, from the largest magnitude to the smallest
    255      zero
    256…509  positive, from the smallest magnitude to the largest
    510      +inf
    511      NaN

What is smaller than the window counts in the smallest bin of its sign. A tensor with NaN or infinities in it has no
largest value to go by; its window ends at 2^16.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hookline.stats.columns import ABSMAX, row_dtype, wide_dtype
from hookline.stats.layout import current_stream, on_device
from hookline.stats.statistics import has_kernels, summarize

BINS = 512
PER_OCTAVE = 8
PER_SIGN = (BINS - 4) // 2
ZERO, INFINITE, NOT_A_NUMBER = PER_SIGN + 1, BINS - 2, BINS - 1
USUAL_TOP, HIGHEST_TOP = 15.0, 127.0  # octaves
LOWEST_TOP = -90.0  # keeps the window clear of float32's subnormal numbers
_PIECE = 1 << 20  # elements


class Histograms(NamedTuple):
    """What was counted: [tensors, bins] as int64, and per tensor the octave of its largest value."""

    counts: Tensor
    tops: Tensor


def histograms(tensors: Sequence[Tensor], rows: Tensor | None = None) -> Histograms:
    """Count every tensor's values; `rows` are what `summarize` gave for the same tensors, to save one read.

    Nothing waits for the device. The counts are exact and the same at every call.
    """
    if not tensors:
        return Histograms(torch.zeros((0, BINS), dtype=torch.int64), torch.zeros(0))
    tops = tops_of(summarize(tensors) if rows is None else rows)
    return Histograms(count(tensors, tops), tops)


def count(tensors: Sequence[Tensor], tops: Tensor) -> Tensor:
    """The counts of each tensor, [tensors, bins], in windows that end with the octaves `tops`."""
    with torch.no_grad():
        if not has_kernels(tops.device):
            return count_in_torch(tensors, tops)
        from hookline.stats import cuda_histograms

        return cuda_histograms.count(tensors, tops)


def percentiles(counted: Histograms, points: Sequence[float]) -> Tensor:
    """The percentiles of each tensor's signed values, [tensors, points], within 5 % of `torch.quantile`'s.

    Like there, a place between two values is interpolated, and a NaN in the tensor makes all of them NaN. The promise
    is for values inside the window; smaller ones come out as its lower end. Nothing waits for the device.
    """
    counts, device = counted.counts, counted.counts.device
    fractions = _fractions(device, current_stream(device), tuple(points))
    if has_kernels(device) and len(counts):
        from hookline.stats import cuda_histograms

        with torch.cuda.device(device):
            return cuda_histograms.percentiles(counts, counted.tops, fractions)
    return look_up(counts, counted.tops, fractions)


@lru_cache(maxsize=16)
def _fractions(device: torch.device, stream: int, points: tuple[float, ...]) -> Tensor:
    """The points as parts of one, on the device; only to be read. The stream is in the key as in `layout_of`'s."""
    return on_device(torch.tensor([point / 100 for point in points], dtype=row_dtype(device)), device)


def look_up(counts: Tensor, tops: Tensor, fractions: Tensor) -> Tensor:
    """The percentiles in torch operations: the bins of the values around each place, and what lies between them."""
    numbers = counts[:, :NOT_A_NUMBER].cumsum(dim=1)
    total = numbers[:, -1:]
    places = fractions * (total - 1).clamp(min=0)
    below = torch.searchsorted(numbers, places.floor().long(), right=True)
    above = torch.searchsorted(numbers, places.ceil().long(), right=True)
    values = values_of_bins(tops)
    lower, upper = (values.gather(1, bins.clamp(max=INFINITE)) for bins in (below, above))
    between = torch.where(below == above, lower, lower + (upper - lower) * (places - places.floor()))
    return between.masked_fill((counts[:, NOT_A_NUMBER:] > 0) | (total == 0), float("nan"))


def tops_of(rows: Tensor) -> Tensor:
    """The octave in which each tensor's window ends; zeros and what is not finite have none of their own."""
    if has_kernels(rows.device) and len(rows):
        from hookline.stats import cuda_histograms

        with torch.cuda.device(rows.device):
            return cuda_histograms.tops_of(rows)
    absmax = rows[:, ABSMAX]
    octaves = torch.frexp(absmax).exponent - 1  # exact, where a logarithm may land just below a power of two
    return torch.where(absmax.isfinite(), octaves.float().clamp(LOWEST_TOP, HIGHEST_TOP), USUAL_TOP)


def values_of_bins(tops: Tensor, per_octave: int = PER_OCTAVE) -> Tensor:
    """The value that stands for each bin but the last, NaN's: in the middle of it on the logarithmic scale.

    [tensors, bins - 1], rising along each row; `per_octave` is what the counts were folded to, if they were.
    """
    places = torch.arange(_per_sign(per_octave), device=tops.device, dtype=row_dtype(tops.device))
    sizes = torch.exp2(tops.to(places.dtype).unsqueeze(1) + 1 - (places + 0.5) / per_octave)
    ends = torch.full_like(sizes[:, :1], float("inf"))
    return torch.cat([-ends, -sizes, torch.zeros_like(ends), sizes.flip(1), ends], dim=1)


def fold(counts: Tensor, per_octave: int) -> Tensor:
    """The same counts in fewer bins: 1, 2 or 4 to the octave and sign instead of 8, in the same order."""
    together, many = PER_OCTAVE // per_octave, _per_sign(per_octave)
    if together == 1:
        return counts
    negative, positive = counts[:, 1:ZERO], counts[:, ZERO + 1 : INFINITE]
    short = many * together - PER_SIGN  # the last group, of the smallest magnitudes, is not full
    negative = torch.nn.functional.pad(negative, (0, short)).view(-1, many, together).sum(dim=2)
    positive = torch.nn.functional.pad(positive, (short, 0)).view(-1, many, together).sum(dim=2)
    return torch.cat([counts[:, :1], negative, counts[:, ZERO : ZERO + 1], positive, counts[:, INFINITE:]], dim=1)


def _per_sign(per_octave: int) -> int:
    return -(-PER_SIGN * per_octave // PER_OCTAVE)


def count_in_torch(tensors: Sequence[Tensor], tops: Tensor) -> Tensor:
    """The counts in torch operations, tensor by tensor, in pieces that keep the memory for indices small."""
    counts = torch.zeros((len(tensors), BINS), dtype=torch.int64, device=tops.device)
    for tensor, top, row in zip(tensors, tops, counts, strict=True):
        for piece in torch.split(tensor.reshape(-1), _PIECE):
            bins = bins_of(piece.to(wide_dtype(piece.dtype)), top)
            row.index_add_(0, bins, torch.ones_like(bins))
    return counts


def bins_of(values: Tensor, top: Tensor) -> Tensor:
    """The bin of each value, for a tensor whose largest value lies in the octave `top`."""
    below_top = (top + 1 - values.abs().log2()) * PER_OCTAVE
    places = below_top.clamp(0, PER_SIGN - 1).nan_to_num().long()
    bins = torch.where(values < 0, 1 + places, 2 * PER_SIGN + 1 - places)
    bins = bins.masked_fill(values == 0, ZERO).masked_fill(values.isnan(), NOT_A_NUMBER)
    return bins.masked_fill(values == float("inf"), INFINITE).masked_fill(values == float("-inf"), 0)
