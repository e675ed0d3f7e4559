# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
"""The Triton kernels for histograms: every chunk of every tensor is counted once; percentiles are looked up."""

from __future__ import annotations

import triton
import triton.language as tl

from hookline.stats.kernels import inside_of, place_of_chunk


@triton.jit
def _log2(size_bits):
    """The logarithm from the bits of a positive float32, exact at powers of two and right to 0.0009 between them.

    That is a hundredth of a bin, for a quarter of the instructions of `tl.log2`.
    """
    over = ((size_bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - 1
    return (size_bits >> 23).to(tl.float32) - 127 + over * (1 + (1 - over) * (0.4228654 - 0.1592202 * over))


@triton.jit
def _bin_of(value, top, PER_OCTAVE: tl.constexpr, PER_SIGN: tl.constexpr):
    """The bin of each value, in the order that `hookline.stats.histograms` describes."""
    bits = value.to(tl.int32, bitcast=True)
    size_bits = bits & 0x7FFFFFFF
    below_top = (top + 1 - _log2(size_bits)) * PER_OCTAVE
    place = tl.minimum(tl.maximum(below_top, 0.0), PER_SIGN - 1.0).to(tl.int32)
    index = tl.where(bits < 0, 1 + place, 2 * PER_SIGN + 1 - place)
    index = tl.where(size_bits == 0, PER_SIGN + 1, index)
    index = tl.where(size_bits == 0x7F800000, tl.where(bits < 0, 0, 2 * PER_SIGN + 2), index)
    return tl.where(size_bits > 0x7F800000, 2 * PER_SIGN + 3, index)


@triton.jit(do_not_specialize=["skipped"])
def count_chunks(
    pointers,
    sizes,
    first_chunks,
    owners,
    tops,
    counts,
    skipped,
    ELEMENT: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    BINS: tl.constexpr,
    PER_OCTAVE: tl.constexpr,
    PER_SIGN: tl.constexpr,
):
    """Add the histogram of one chunk to its tensor's; integers, so the order of the programs does not matter."""
    chunk = tl.program_id(0) + skipped
    owner = tl.load(owners + chunk)
    top = tl.load(tops + owner)
    number = chunk - tl.load(first_chunks + owner)
    base, begin, end = place_of_chunk(pointers + owner, sizes + owner, number, ELEMENT, ITEM_BYTES, TILE * TILES)
    lanes = tl.arange(0, TILE)
    found = tl.zeros([BINS], tl.int32)
    if (begin == 0) & (end == TILE * TILES):
        for tile in range(TILES):
            value = tl.load(tl.multiple_of(base + tile * TILE + lanes, 16)).to(tl.float32)
            found += tl.histogram(_bin_of(value, top, PER_OCTAVE, PER_SIGN), BINS)
    else:
        for start in range(0, end, TILE):
            inside = inside_of(start + lanes, begin, end)
            value = tl.load(base + start + lanes, mask=inside, other=0).to(tl.float32)
            found += tl.histogram(_bin_of(value, top, PER_OCTAVE, PER_SIGN), BINS, mask=inside)
    tl.atomic_add(counts + owner * BINS + tl.arange(0, BINS), found.to(tl.int64), mask=found > 0, sem="relaxed")


@triton.jit
def _value_of(index, top, PER_OCTAVE: tl.constexpr, PER_SIGN: tl.constexpr):
    """What stands for a bin: the middle of it on the logarithmic scale."""
    place = tl.where(index > PER_SIGN, 2 * PER_SIGN + 1 - index, index - 1)
    size = tl.exp2((top + 1 - (place + 0.5) / PER_OCTAVE).to(tl.float32)).to(tl.float64)
    size = tl.where((index == 0) | (index == 2 * PER_SIGN + 2), float("inf"), size)
    return tl.where(index == PER_SIGN + 1, 0.0, tl.where(index <= PER_SIGN, -size, size))


@triton.jit(do_not_specialize=["points"])
def look_up(
    counts, tops, fractions, found, points, BINS: tl.constexpr, PER_OCTAVE: tl.constexpr, PER_SIGN: tl.constexpr
):
    """Write the percentiles of one tensor: the bins of the values around each place, and what lies between them."""
    tensor, bins = tl.program_id(0), tl.arange(0, BINS)
    counted = tl.load(counts + tensor * BINS + bins)
    top = tl.load(tops + tensor)
    numbers = tl.where(bins < BINS - 1, counted, 0)
    total, nans = tl.sum(numbers), tl.sum(counted - numbers)
    so_far = tl.cumsum(numbers, 0)
    for point in range(points):
        place = tl.load(fractions + point) * tl.maximum(total - 1, 0).to(tl.float64)
        floor = tl.floor(place)
        below = tl.sum((so_far <= floor.to(tl.int64)).to(tl.int32))
        above = tl.sum((so_far <= tl.ceil(place).to(tl.int64)).to(tl.int32))
        lower, upper = _value_of(below, top, PER_OCTAVE, PER_SIGN), _value_of(above, top, PER_OCTAVE, PER_SIGN)
        value = tl.where(below == above, lower, lower + (upper - lower) * (place - floor))
        tl.store(found + tensor * points + point, tl.where((nans > 0) | (total == 0), float("nan"), value))
