# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
"""The Triton kernels of the CUDA path: read every chunk once, then merge the chunks of each tensor.

A chunk is a run of elements that one program reads. Its sums are taken around a pivot, the mean of its first tile, so
that a mean far from zero costs no digits: where the pivot is off, the spread that makes it so is in the chunk itself.

Per element the loop does what it cannot avoid: convert, subtract, two sums, minimum, maximum and a test for zero. At
two bytes an element, counting NaNs and infinities there too would make the arithmetic, not the memory, set the pace.
They show in the sum of squares, so only a chunk whose sum is not finite, or vanishes, is read again in float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

FAINT: tl.constexpr = tl.constexpr(1e-24)  # a sum of squares below has lost digits to float32's smallest numbers
PARTIAL_COLUMNS = 8  # count, mean, sum of squared deviations, min, max, zeros, nans, infs of one chunk


@triton.jit
def _finite_or_zero(value):
    return tl.where(value - value == 0, value, 0.0)


@triton.jit
def inside_of(lanes, begin, end):
    """Which elements of a chunk belong to its tensor."""
    return (lanes >= begin) & (lanes < end)


@triton.jit
def place_of_chunk(address, size, number, ELEMENT: tl.constexpr, ITEM_BYTES: tl.constexpr, ELEMENTS: tl.constexpr):
    """Where a tensor's chunk of this number begins, and from where to where its elements belong to the tensor.

    Chunks are counted from the 16-byte boundary at or before the tensor, so that a whole one can be read in vectors.
    """
    address, size = tl.load(address), tl.load(size)
    start = number.to(tl.int64) * ELEMENTS
    lead = (address % 16) // ITEM_BYTES
    aligned = tl.multiple_of((address - address % 16).to(tl.pointer_type(ELEMENT), bitcast=True), 16)
    begin = tl.maximum(lead - start, 0).to(tl.int32)
    end = tl.maximum(tl.minimum(lead + size - start, ELEMENTS), 0).to(tl.int32)
    return tl.multiple_of(aligned + start, 16), begin, end


@triton.jit
def _vectors(base, lanes):
    """The addresses of one tile; without the hint every element would be loaded on its own."""
    return tl.multiple_of(base + lanes, 16)


@triton.jit
def _read_inner_chunk(base, WIDE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, UNROLL: tl.constexpr):
    """Sums of a chunk that lies wholly inside its tensor: no masks, several loads on their way at once."""
    lanes = tl.arange(0, TILE)
    pivot = _finite_or_zero(tl.sum(tl.load(_vectors(base, lanes)).to(WIDE)) / TILE)
    total, squares = tl.zeros([TILE], WIDE), tl.zeros([TILE], WIDE)
    low, high = tl.full([TILE], float("inf"), WIDE), tl.full([TILE], float("-inf"), WIDE)
    zeros = tl.zeros([TILE], tl.int32)
    for tile in range(0, TILES, UNROLL):
        for ahead in tl.static_range(UNROLL):
            value = tl.load(_vectors(base + (tile + ahead) * TILE, lanes)).to(WIDE)
            deviation = value - pivot
            total += deviation
            squares += deviation * deviation
            low, high = tl.minimum(low, value), tl.maximum(high, value)
            zeros += (value == 0).to(tl.int32)
    return pivot, tl.sum(total), tl.sum(squares), tl.min(low), tl.max(high), tl.sum(zeros)


@triton.jit
def _read_edge_chunk(base, begin, end, WIDE: tl.constexpr, TILE: tl.constexpr):
    """The same for a chunk of which only the elements from begin to end belong to the tensor."""
    lanes = tl.arange(0, TILE)
    inside = inside_of(lanes, begin, end)
    first = tl.sum(tl.load(base + lanes, mask=inside, other=0).to(WIDE))
    pivot = _finite_or_zero(first / tl.maximum(tl.sum(inside.to(tl.int32)), 1))
    total, squares = tl.zeros([TILE], WIDE), tl.zeros([TILE], WIDE)
    low, high = tl.full([TILE], float("inf"), WIDE), tl.full([TILE], float("-inf"), WIDE)
    zeros = tl.zeros([TILE], tl.int32)
    for start in range(0, end, TILE):
        inside = inside_of(start + lanes, begin, end)
        value = tl.load(base + start + lanes, mask=inside, other=0).to(WIDE)
        deviation = tl.where(inside, value - pivot, 0.0)
        total += deviation
        squares += deviation * deviation
        low, high = (
            tl.minimum(low, tl.where(inside, value, float("inf"))),
            tl.maximum(high, tl.where(inside, value, float("-inf"))),
        )
        zeros += (inside & (value == 0)).to(tl.int32)
    return pivot, tl.sum(total), tl.sum(squares), tl.min(low), tl.max(high), tl.sum(zeros)


@triton.jit
def _read_again(base, begin, end, TILE: tl.constexpr):
    """Sums around zero in float64, and how many values are not finite: for a chunk where float32 was not enough."""
    lanes = tl.arange(0, TILE)
    total, squares = tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64)
    nans, infs = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    for start in range(0, end, TILE):
        inside = inside_of(start + lanes, begin, end)
        value = tl.load(base + start + lanes, mask=inside, other=0).to(tl.float64)
        total += value
        squares += value * value
        nans += (value != value).to(tl.int32)
        infs += (tl.abs(value) == float("inf")).to(tl.int32)
    return tl.sum(total), tl.sum(squares), tl.sum(nans).to(tl.float64), tl.sum(infs).to(tl.float64)


@triton.jit(do_not_specialize=["skipped", "chunks"])
def read_chunks(
    pointers,
    sizes,
    first_chunks,
    owners,
    partials,
    skipped,
    chunks,
    ELEMENT: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Write the partial results of one chunk."""
    chunk = tl.program_id(0) + skipped
    owner = tl.load(owners + chunk)
    number = chunk - tl.load(first_chunks + owner)
    base, begin, end = place_of_chunk(pointers + owner, sizes + owner, number, ELEMENT, ITEM_BYTES, TILE * TILES)
    if (begin == 0) & (end == TILE * TILES):
        pivot, total, squares, low, high, zeros = _read_inner_chunk(base, WIDE, TILE, TILES, UNROLL)
    else:
        pivot, total, squares, low, high, zeros = _read_edge_chunk(base, begin, end, WIDE, TILE)
    count = tl.maximum(end - begin, 0).to(tl.float64)
    total, squares, pivot = total.to(tl.float64), squares.to(tl.float64), pivot.to(tl.float64)
    nans, infs = count * 0, count * 0
    if (squares - squares != 0) | ((squares < FAINT) & (low < high)):
        total, squares, nans, infs = _read_again(base, begin, end, TILE)
        pivot = pivot * 0
    shift = total / tl.maximum(count, 1)
    tl.store(partials + chunk, count)
    tl.store(partials + chunks + chunk, pivot + shift)
    tl.store(partials + 2 * chunks + chunk, squares - total * shift)
    tl.store(partials + 3 * chunks + chunk, low.to(tl.float64))
    tl.store(partials + 4 * chunks + chunk, high.to(tl.float64))
    tl.store(partials + 5 * chunks + chunk, zeros.to(tl.float64))
    tl.store(partials + 6 * chunks + chunk, nans)
    tl.store(partials + 7 * chunks + chunk, infs)


@triton.jit(do_not_specialize=["chunks"])
def merge_chunks(first_chunks, chunk_counts, partials, rows, chunks, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """Write one tensor's row from the partial results of its chunks, always added in the same order."""
    tensor = tl.program_id(0)
    mine = partials + tl.load(first_chunks + tensor)
    many = tl.load(chunk_counts + tensor)
    pivot = _finite_or_zero(tl.load(mine + chunks, mask=many > 0, other=0.0))
    lanes = tl.arange(0, TILE)
    count, shift, squares = tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64)
    low, high = tl.full([TILE], float("inf"), tl.float64), tl.full([TILE], float("-inf"), tl.float64)
    zeros, nans, infs = tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64)
    for start in range(0, many, TILE):
        place, inside = mine + start + lanes, start + lanes < many
        weight = tl.load(place, mask=inside, other=0.0)
        deviation = tl.load(place + chunks, mask=inside, other=0.0) - tl.where(inside, pivot, 0.0)
        count += weight
        shift += weight * deviation
        squares += tl.load(place + 2 * chunks, mask=inside, other=0.0) + weight * deviation * deviation
        low = tl.minimum(low, tl.load(place + 3 * chunks, mask=inside, other=float("inf")))
        high = tl.maximum(high, tl.load(place + 4 * chunks, mask=inside, other=float("-inf")))
        zeros += tl.load(place + 5 * chunks, mask=inside, other=0.0)
        nans += tl.load(place + 6 * chunks, mask=inside, other=0.0)
        infs += tl.load(place + 7 * chunks, mask=inside, other=0.0)
    row, total_count, total_nans, total_infs = rows + tensor * COLUMNS, tl.sum(count), tl.sum(nans), tl.sum(infs)
    _write_moments(row, total_count, pivot, tl.sum(shift), tl.sum(squares), total_nans, total_infs)
    _write_extremes(row, total_count, tl.min(low), tl.max(high), total_nans)
    tl.store(row + 7, tl.sum(zeros))
    tl.store(row + 8, total_nans)
    tl.store(row + 9, total_infs)


@triton.jit
def _write_moments(row, count, pivot, shift, squares, nans, infs):
    """Count, mean, std and L2 norm; 0 / 0 gives an empty tensor the NaN it should have."""
    mean = pivot + shift / count
    deviations = squares - shift * shift / count
    deviations = tl.where(deviations < 0, 0.0, deviations)
    about_zero = tl.where(count > 0, deviations + count * mean * mean, 0.0)
    tl.store(row, count)
    tl.store(row + 1, mean)
    tl.store(row + 2, tl.sqrt(deviations / tl.maximum(count - 1, 1.0)))
    tl.store(row + 6, tl.where((infs > 0) & (nans == 0), float("inf"), tl.sqrt(about_zero)))


@triton.jit
def _write_extremes(row, count, low, high, nans):
    """Minimum, maximum and the larger of their magnitudes; NaN if there is a NaN, or nothing at all."""
    none = (nans > 0) | (count == 0)
    tl.store(row + 3, tl.where(none, float("nan"), low))
    tl.store(row + 4, tl.where(none, float("nan"), high))
    tl.store(row + 5, tl.where(none, float("nan"), tl.maximum(-low, high)))
