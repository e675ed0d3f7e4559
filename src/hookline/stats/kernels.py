# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
"""The Triton kernels of the CUDA path: read every chunk once, then merge the chunks of each tensor.

A chunk is a run of elements that one program reads. Its sums are taken around pivots, values from its beginning, so
that a mean far from zero costs no digits: where a pivot is off, the spread that makes it so is in the chunk itself.

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
def finite_or_zero(value):
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
    return chunk_at(tl.load(address), tl.load(size), number, ELEMENT, ITEM_BYTES, ELEMENTS)


@triton.jit
def chunk_at(address, size, number, ELEMENT: tl.constexpr, ITEM_BYTES: tl.constexpr, elements):
    """The same for a tensor whose address and size are known, in chunks of so many elements."""
    start = number.to(tl.int64) * elements
    lead = (address % 16) // ITEM_BYTES
    aligned = tl.multiple_of((address - address % 16).to(tl.pointer_type(ELEMENT), bitcast=True), 16)
    begin = tl.maximum(lead - start, 0).to(tl.int32)
    end = tl.maximum(tl.minimum(lead + size - start, elements), 0).to(tl.int32)
    return tl.multiple_of(aligned + start, 16), begin, end


@triton.jit
def _vectors(base, lanes):
    """The addresses of one tile; without the hint every element would be loaded on its own."""
    return tl.multiple_of(base + lanes, 16)


@triton.jit
def _read_inner_chunk(base, tiles, WIDE: tl.constexpr, TILE: tl.constexpr, UNROLL: tl.constexpr):
    """What each lane sees of a chunk that lies wholly inside its tensor: no masks, several loads on their way at once.

    Each lane has a pivot of its own, its first element: to agree on one, all would have to wait for each other.
    """
    lanes = tl.arange(0, TILE)
    pivot = finite_or_zero(tl.load(_vectors(base, lanes)).to(WIDE))
    total, squares = tl.zeros([TILE], WIDE), tl.zeros([TILE], WIDE)
    low, high = tl.full([TILE], float("inf"), WIDE), tl.full([TILE], float("-inf"), WIDE)
    zeros = tl.zeros([TILE], tl.int32)
    for tile in range(0, tiles, UNROLL):
        for ahead in tl.static_range(UNROLL):
            value = tl.load(_vectors(base + (tile + ahead) * TILE, lanes)).to(WIDE)
            deviation = value - pivot
            total += deviation
            squares += deviation * deviation
            low, high = tl.minimum(low, value), tl.maximum(high, value)
            zeros += (value == 0).to(tl.int32)
    return pivot, total, squares, low, high, zeros


@triton.jit
def _read_edge_chunk(base, begin, end, WIDE: tl.constexpr, TILE: tl.constexpr):
    """The same for a chunk of which only the elements from begin to end belong to the tensor."""
    lanes = tl.arange(0, TILE)
    first = tl.load(base + begin, mask=begin < end, other=0).to(WIDE)  # for lanes that begin with a later element
    inside = inside_of(lanes, begin, end)
    pivot = finite_or_zero(tl.where(inside, tl.load(base + lanes, mask=inside, other=0).to(WIDE), first))
    total, squares = tl.zeros([TILE], WIDE), tl.zeros([TILE], WIDE)
    low, high = tl.full([TILE], float("inf"), WIDE), tl.full([TILE], float("-inf"), WIDE)
    zeros = tl.zeros([TILE], tl.int32)
    for start in range(0, end, TILE):
        inside = inside_of(start + lanes, begin, end)
        value = tl.load(base + start + lanes, mask=inside, other=0).to(WIDE)
        deviation = tl.where(inside, value - pivot, 0.0)
        total += deviation
        squares += deviation * deviation
        low = tl.minimum(low, tl.where(inside, value, float("inf")))
        high = tl.maximum(high, tl.where(inside, value, float("-inf")))
        zeros += (inside & (value == 0)).to(tl.int32)
    return pivot, total, squares, low, high, zeros


@triton.jit
def _over_lanes(begin, end, pivot, total, squares, TILE: tl.constexpr):
    """The mean of the elements from begin to end, and the sum of squared deviations from it, from what lanes saw."""
    lanes, count = tl.arange(0, TILE), tl.maximum(end - begin, 0)
    many = tl.cdiv(tl.maximum(end - lanes, 0), TILE) - tl.cdiv(tl.maximum(begin - lanes, 0), TILE)  # of each lane
    shift = total / tl.maximum(many, 1)
    center = tl.sum((pivot + shift) * many) / tl.maximum(count, 1)
    off = tl.where(many > 0, (pivot - center) + shift, 0.0)  # exact where pivot + shift has only the mean's digits
    squares = tl.sum(squares - total * shift + many * off * off)
    rest = tl.sum(off * many).to(tl.float64) / tl.maximum(count, 1)
    return center.to(tl.float64) + rest, squares.to(tl.float64) - rest * rest * count


@triton.jit
def _read_again(base, begin, end, TILE: tl.constexpr):
    """The moments in float64, and how many values are not finite: for a chunk where float32 was not enough."""
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
    sum_of_values, shift = tl.sum(total), tl.sum(total) / tl.maximum(end - begin, 1)
    deviations = tl.sum(squares) - sum_of_values * shift
    return shift, deviations, tl.sum(nans).to(tl.float64), tl.sum(infs).to(tl.float64)


@triton.jit
def partials_of(base, begin, end, tiles, WIDE: tl.constexpr, TILE: tl.constexpr, UNROLL: tl.constexpr):
    """The partial results of a chunk of so many tiles, of which the elements from begin to end are the tensor's."""
    if (begin == 0) & (end == TILE * tiles):
        pivot, total, squares, low, high, zeros = _read_inner_chunk(base, tiles, WIDE, TILE, UNROLL)
    else:
        pivot, total, squares, low, high, zeros = _read_edge_chunk(base, begin, end, WIDE, TILE)
    count = tl.maximum(end - begin, 0)
    mean, deviations = _over_lanes(begin, end, pivot, total, squares, TILE)
    lowest, highest, all_zeros = tl.min(low).to(tl.float64), tl.max(high).to(tl.float64), tl.sum(zeros).to(tl.float64)
    nans, infs = all_zeros * 0, all_zeros * 0
    if (deviations - deviations != 0) | ((deviations < FAINT) & (lowest < highest)):
        mean, deviations, nans, infs = _read_again(base, begin, end, TILE)
    return count.to(tl.float64), mean, deviations, lowest, highest, all_zeros, nans, infs


@triton.jit
def store_partials(place, stride, count, mean, squares, low, high, zeros, nans, infs):
    """Write the partial results of one chunk, a column each."""
    tl.store(place, count)
    tl.store(place + stride, mean)
    tl.store(place + 2 * stride, squares)
    tl.store(place + 3 * stride, low)
    tl.store(place + 4 * stride, high)
    tl.store(place + 5 * stride, zeros)
    tl.store(place + 6 * stride, nans)
    tl.store(place + 7 * stride, infs)


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
    count, mean, squares, low, high, zeros, nans, infs = partials_of(base, begin, end, TILES, WIDE, TILE, UNROLL)
    store_partials(partials + chunk, chunks, count, mean, squares, low, high, zeros, nans, infs)


@triton.jit(do_not_specialize=["chunks"])
def merge_chunks(first_chunks, chunk_counts, partials, rows, chunks, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """Write one tensor's row from the partial results of its chunks, always added in the same order."""
    tensor = tl.program_id(0)
    first, many = tl.load(first_chunks + tensor), tl.load(chunk_counts + tensor)
    merge_partials(partials + first, chunks, many, rows + tensor * COLUMNS, TILE)


@triton.jit
def merge_partials(mine, stride, many, row, TILE: tl.constexpr):
    """Write a row from so many partial results; those of nothing, whose count is zero, may hold anything else."""
    pivot = finite_or_zero(tl.load(mine + stride, mask=many > 0, other=0.0))
    lanes = tl.arange(0, TILE)
    count, shift, squares = tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64)
    low, high = tl.full([TILE], float("inf"), tl.float64), tl.full([TILE], float("-inf"), tl.float64)
    zeros, nans, infs = tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64)
    for start in range(0, many, TILE):
        place = mine + start + lanes
        weight = tl.load(place, mask=start + lanes < many, other=0.0)
        some = weight > 0
        deviation = tl.load(place + stride, mask=some, other=0.0) - tl.where(some, pivot, 0.0)
        count += weight
        shift += weight * deviation
        squares += tl.load(place + 2 * stride, mask=some, other=0.0) + weight * deviation * deviation
        low = tl.minimum(low, tl.load(place + 3 * stride, mask=some, other=float("inf")))
        high = tl.maximum(high, tl.load(place + 4 * stride, mask=some, other=float("-inf")))
        zeros += tl.load(place + 5 * stride, mask=some, other=0.0)
        nans += tl.load(place + 6 * stride, mask=some, other=0.0)
        infs += tl.load(place + 7 * stride, mask=some, other=0.0)
    total_count, total_nans, total_infs = tl.sum(count), tl.sum(nans), tl.sum(infs)
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
