# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
"""Triton kernels for statistics and histograms: read every chunk of every tensor once, then merge those of each tensor.

A chunk is a run of elements that one program reads. Its sums are taken around pivots, values from its beginning, so
that a mean far from zero costs no digits: where a pivot is far off, the chunk itself has a large spread.

Per element, the loop does only what is necessary: convert, subtract, two sums, minimum, maximum and a test for zero. At
two bytes an element, counting NaNs and infinities there too would make the kernel bound by arithmetic instead of
memory. They show in the sum of squares, so only a chunk whose sum is not finite, or vanishes, is read again in float64.

An accumulator is float64 memory that outlives a launch: how often it was called and how often it added something, then
the partial results of a fixed number of shares, column by column. Each program of a launch has its own share, so that
no two of them write to one place and the sums have the same bits every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

FAINT: tl.constexpr = tl.constexpr(1e-24)  # a smaller sum of squares has lost digits to float32's smallest numbers
HEAD: tl.constexpr = tl.constexpr(2)  # the two counts at the start of an accumulator, before its shares
PARTIAL_COLUMNS = 8  # count, mean, sum of squared deviations, min, max, zeros, nans, infs of one chunk


@triton.jit
def finite_or_zero(value):
    return tl.where(value - value == 0, value, 0.0)


@triton.jit
def inside_of(lanes, begin, end):
    """Return which elements of a chunk belong to its tensor."""
    return (lanes >= begin) & (lanes < end)


@triton.jit
def chunk_at(address, size, number, ELEMENT: tl.constexpr, ITEM_BYTES: tl.constexpr, elements):
    """Return where a tensor's chunk of `elements` elements begins, and the range of them that belong to the tensor.

    Chunks are counted from the 16-byte boundary at or before the tensor, so that a whole one can be read in vectors.
    """
    start = number.to(tl.int64) * elements
    lead = (address % 16) // ITEM_BYTES
    aligned = tl.multiple_of((address - address % 16).to(tl.pointer_type(ELEMENT), bitcast=True), 16)
    begin = tl.maximum(lead - start, 0).to(tl.int32)
    end = tl.maximum(tl.minimum(lead + size - start, elements), 0).to(tl.int32)
    return tl.multiple_of(aligned + start, 16), begin, end


@triton.jit
def _vectors(base, lanes):
    """Return the addresses of one tile; without the hint every element would be loaded separately."""
    return tl.multiple_of(base + lanes, 16)


@triton.jit
def _read_inner_chunk(base, tiles, WIDE: tl.constexpr, TILE: tl.constexpr, UNROLL: tl.constexpr):
    """Return the sums of each lane for a chunk that lies inside its tensor: no masks, several loads in flight at once.

    Each lane uses its first element as its pivot: to agree on one pivot, all lanes would have to wait for each other.
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
    """Return the same for a chunk of which only the elements from begin to end belong to the tensor."""
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
    """Return the mean of the elements from begin to end and the sum of squared deviations, from the sums of lanes."""
    lanes, count = tl.arange(0, TILE), tl.maximum(end - begin, 0)
    # The number of elements in each lane.
    per_lane = tl.cdiv(tl.maximum(end - lanes, 0), TILE) - tl.cdiv(tl.maximum(begin - lanes, 0), TILE)
    shift = total / tl.maximum(per_lane, 1)
    center = tl.sum((pivot + shift) * per_lane) / tl.maximum(count, 1)
    off = tl.where(per_lane > 0, (pivot - center) + shift, 0.0)  # exact where pivot + shift has only the mean's digits
    squares = tl.sum(squares - total * shift + per_lane * off * off)
    rest = tl.sum(off * per_lane).to(tl.float64) / tl.maximum(count, 1)
    return center.to(tl.float64) + rest, squares.to(tl.float64) - rest * rest * count


@triton.jit
def _read_again(base, begin, end, TILE: tl.constexpr):
    """Return the moments in float64 and the counts of NaNs and infinities, for a chunk where float32 was not enough."""
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
    """Return the partial results of a chunk of `tiles` tiles, whose elements from begin to end are the tensor's."""
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
    sizes,
    first_chunks,
    owners,
    skipped,
    chunks,
    pointers,
    partials,
    ELEMENT: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    WIDE: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Write the partial results of one chunk."""
    chunk = tl.program_id(0) + skipped
    owner = tl.load(owners + chunk)
    number = chunk - tl.load(first_chunks + owner)
    address, size = tl.load(pointers + owner), tl.load(sizes + owner)
    base, begin, end = chunk_at(address, size, number, ELEMENT, ITEM_BYTES, TILE * TILES)
    count, mean, squares, low, high, zeros, nans, infs = partials_of(base, begin, end, TILES, WIDE, TILE, UNROLL)
    store_partials(partials + chunk, chunks, count, mean, squares, low, high, zeros, nans, infs)


@triton.jit(do_not_specialize=["chunks"])
def merge_chunks(first_chunks, chunk_counts, chunks, partials, rows, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """Write one tensor's row from the partial results of its chunks, always added in the same order."""
    tensor = tl.program_id(0)
    first, parts = tl.load(first_chunks + tensor), tl.load(chunk_counts + tensor)
    merge_partials(partials + first, chunks, parts, rows + tensor * COLUMNS, TILE)


@triton.jit
def merge_partials(mine, stride, parts, row, TILE: tl.constexpr):
    """Write a row from `parts` partial results; where the count is zero, the other columns may hold anything."""
    pivot = finite_or_zero(tl.load(mine + stride, mask=parts > 0, other=0.0))
    lanes = tl.arange(0, TILE)
    count, shift, squares = tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64)
    low, high = tl.full([TILE], float("inf"), tl.float64), tl.full([TILE], float("-inf"), tl.float64)
    zeros, nans, infs = tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64)
    for start in range(0, parts, TILE):
        place = mine + start + lanes
        weight = tl.load(place, mask=start + lanes < parts, other=0.0)
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
    """Write count, mean, std and L2 norm; 0 / 0 gives an empty tensor the NaN it should have."""
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
    """Write minimum, maximum and the larger of their magnitudes; NaN if there is a NaN, or no element."""
    none = (nans > 0) | (count == 0)
    tl.store(row + 3, tl.where(none, float("nan"), low))
    tl.store(row + 4, tl.where(none, float("nan"), high))
    tl.store(row + 5, tl.where(none, float("nan"), tl.maximum(-low, high)))


# ---- accumulators ----------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["sizes", "tiles", "firsts", "addresses", "accumulators"])
def add_to_accumulators(
    sizes,
    tiles,
    firsts,
    due,
    addresses,
    accumulators,
    ELEMENT: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    SLOTS: tl.constexpr,
    SHARES: tl.constexpr,
    TILE: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Add what this program reads of its tensor to its share; if the statistics are not due, only count the call.

    Each tensor has a slot in five tuples: its number of elements, the tiles of a share, the first of its programs, its
    address and its accumulator's address. They are passed by value: a replayed graph would not find a table again.
    """
    program, heard = tl.program_id(0), tl.load(due)
    size, length, first, address, place = sizes[0], tiles[0], firsts[0], addresses[0], accumulators[0]
    for slot in tl.static_range(1, SLOTS):
        at_or_behind = program >= firsts[slot]
        size, length = tl.where(at_or_behind, sizes[slot], size), tl.where(at_or_behind, tiles[slot], length)
        first, address = tl.where(at_or_behind, firsts[slot], first), tl.where(at_or_behind, addresses[slot], address)
        place = tl.where(at_or_behind, accumulators[slot], place)
    share = program - first
    accumulator = place.to(tl.pointer_type(tl.float64), bitcast=True)
    if share == 0:
        tl.store(accumulator, tl.load(accumulator) + 1)
        tl.store(accumulator + 1, tl.load(accumulator + 1) + heard)
    if heard != 0:
        WIDE: tl.constexpr = tl.float64 if ITEM_BYTES == 8 else tl.float32
        base, begin, end = chunk_at(address, size, share, ELEMENT, ITEM_BYTES, TILE * length)
        if begin < end:
            count, mean, squares, low, high, zeros, nans, infs = partials_of(
                base, begin, end, length, WIDE, TILE, UNROLL
            )
            _add_partials(accumulator + HEAD + share, SHARES, count, mean, squares, low, high, zeros, nans, infs)


@triton.jit
def _add_partials(place, stride, count, mean, squares, low, high, zeros, nans, infs):
    """Merge partial results with those of earlier calls, around one of the means, and store them."""
    known = tl.load(place)
    some = known > 0
    known_mean = tl.load(place + stride, mask=some, other=0.0)
    pivot = finite_or_zero(tl.where(some, known_mean, mean))
    here, there = tl.where(some, known_mean - pivot, 0.0), mean - pivot
    total = known + count
    shift = known * here + count * there
    squares += tl.load(place + 2 * stride, mask=some, other=0.0)
    squares += known * here * here + count * there * there - shift * (shift / total)
    low = tl.minimum(low, tl.load(place + 3 * stride, mask=some, other=float("inf")))
    high = tl.maximum(high, tl.load(place + 4 * stride, mask=some, other=float("-inf")))
    zeros += tl.load(place + 5 * stride, mask=some, other=0.0)
    nans += tl.load(place + 6 * stride, mask=some, other=0.0)
    infs += tl.load(place + 7 * stride, mask=some, other=0.0)
    store_partials(place, stride, total, pivot + shift / total, squares, low, high, zeros, nans, infs)


@triton.jit
def read_accumulators(accumulators, rows, counts, COLUMNS: tl.constexpr, SHARES: tl.constexpr, TILE: tl.constexpr):
    """Write an accumulator's row, add to its two counts and reset it; one that added nothing gets NaN as its count."""
    number = tl.program_id(0)
    accumulator = tl.load(accumulators + number).to(tl.pointer_type(tl.float64), bitcast=True)
    row, count, shares = rows + number * COLUMNS, counts + number * HEAD, accumulator + HEAD
    called, heard = tl.load(accumulator), tl.load(accumulator + 1)
    merge_partials(shares, SHARES, SHARES, row, TILE)
    if heard == 0:
        tl.store(row, float("nan"))
    tl.store(count, tl.load(count) + called)
    tl.store(count + 1, tl.load(count + 1) + heard)
    lanes = tl.arange(0, TILE)
    tl.debug_barrier()  # all threads have read
    tl.store(accumulator + lanes, 0.0, mask=lanes < HEAD)
    for start in range(0, SHARES, TILE):
        tl.store(shares + start + lanes, 0.0, mask=start + lanes < SHARES)


# ---- histograms ------------------------------------------------------------------------------------------------------


@triton.jit
def _bin_of(value, highest, PER_OCTAVE: tl.constexpr, PER_SIGN: tl.constexpr):
    """Return the bin of each value, in the order that `hookline.stats.histograms` describes.

    The bits of a positive float32, read as a number, are its logarithm, except for the curvature between two powers of
    two. A cubic approximates it to within 0.0009, a hundredth of a bin, for a quarter of the instructions of `tl.log2`.
    """
    bits = value.to(tl.int32, bitcast=True)
    size_bits = bits & 0x7FFFFFFF
    over = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    bend = (over - 1) * (2 - over) * (0.5820856 * PER_OCTAVE - 0.1592202 * PER_OCTAVE * over)
    below_top = highest - size_bits.to(tl.float32) * (PER_OCTAVE / 8388608.0) - bend
    place = tl.minimum(tl.maximum(below_top, 0.0), PER_SIGN - 1.0).to(tl.int32)
    index = tl.where(bits < 0, 1 + place, 2 * PER_SIGN + 1 - place)
    index = tl.where(size_bits == 0, PER_SIGN + 1, index)
    index = tl.where(size_bits == 0x7F800000, tl.where(bits < 0, 0, 2 * PER_SIGN + 2), index)
    return tl.where(size_bits > 0x7F800000, 2 * PER_SIGN + 3, index)


# Triton has no counters in shared memory, so PTX makes them. A kernel may contain the declaration only once.
SET_TO_ZERO: tl.constexpr = tl.constexpr("st.shared.u32 [$1], 0; mov.u32 $0, 0;")
ADD_ONE: tl.constexpr = tl.constexpr("red.shared.add.u32 [$1], 1; mov.u32 $0, 0;")
READ: tl.constexpr = tl.constexpr("ld.shared.u32 $0, [$1];")


@triton.jit
def _run(PTX: tl.constexpr, address):
    """Run an instruction at each address, and return what it loads."""
    return tl.inline_asm_elementwise(PTX, "=r,r", [address], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _count_in_shared_memory(
    base,
    begin,
    end,
    highest,
    ITEM_BYTES: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    BINS: tl.constexpr,
    PER_OCTAVE: tl.constexpr,
    PER_SIGN: tl.constexpr,
    DECLARATION: tl.constexpr,
    COPIES: tl.constexpr,
):
    """Count in shared memory; adjacent threads have different copies of the counters, so that they rarely collide."""
    lanes, bins, stride = tl.arange(0, TILE), tl.arange(0, BINS) * 4, (BINS + 1) * 4
    counters = _run(DECLARATION, 0)  # their address
    for copy in tl.static_range(COPIES):
        _run(SET_TO_ZERO, counters + copy * stride + bins)
    tl.debug_barrier()
    mine = counters + (lanes * ITEM_BYTES // 16) % COPIES * stride
    if (begin == 0) & (end == TILE * TILES):
        for tile in range(TILES):
            value = tl.load(tl.multiple_of(base + tile * TILE + lanes, 16)).to(tl.float32)
            _run(ADD_ONE, mine + _bin_of(value, highest, PER_OCTAVE, PER_SIGN) * 4)
    else:
        for start in range(0, end, TILE):
            inside = inside_of(start + lanes, begin, end)
            value = tl.load(base + start + lanes, mask=inside, other=0).to(tl.float32)
            _run(ADD_ONE, mine + tl.where(inside, _bin_of(value, highest, PER_OCTAVE, PER_SIGN), BINS) * 4)
    tl.debug_barrier()
    counts = tl.zeros([BINS], tl.int32)
    for copy in tl.static_range(COPIES):
        counts += _run(READ, counters + copy * stride + bins)
    return counts


@triton.jit
def _count_in_registers(
    base,
    begin,
    end,
    highest,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    PER_OCTAVE: tl.constexpr,
    PER_SIGN: tl.constexpr,
):
    """Count with Triton's own histogram, which is bound by a population count for every 16 bins and element."""
    lanes = tl.arange(0, TILE)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, end, TILE):
        inside = inside_of(start + lanes, begin, end)
        value = tl.load(base + start + lanes, mask=inside, other=0).to(tl.float32)
        counts += tl.histogram(_bin_of(value, highest, PER_OCTAVE, PER_SIGN), BINS, mask=inside)
    return counts


@triton.jit(do_not_specialize=["skipped"])
def count_chunks(
    sizes,
    first_chunks,
    owners,
    skipped,
    pointers,
    tops,
    counts,
    ELEMENT: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    BINS: tl.constexpr,
    PER_OCTAVE: tl.constexpr,
    PER_SIGN: tl.constexpr,
    DECLARATION: tl.constexpr,
    COPIES: tl.constexpr,
):
    """Add the histogram of one chunk to its tensor's; integers, so the order of the programs does not matter."""
    chunk = tl.program_id(0) + skipped
    owner = tl.load(owners + chunk)
    highest = (tl.load(tops + owner) + 128) * PER_OCTAVE
    number = chunk - tl.load(first_chunks + owner)
    address, size = tl.load(pointers + owner), tl.load(sizes + owner)
    base, begin, end = chunk_at(address, size, number, ELEMENT, ITEM_BYTES, TILE * TILES)
    if DECLARATION is None:
        of_chunk = _count_in_registers(base, begin, end, highest, TILE, BINS, PER_OCTAVE, PER_SIGN)
    else:
        of_chunk = _count_in_shared_memory(
            base, begin, end, highest, ITEM_BYTES, TILE, TILES, BINS, PER_OCTAVE, PER_SIGN, DECLARATION, COPIES
        )
    tl.atomic_add(counts + owner * BINS + tl.arange(0, BINS), of_chunk.to(tl.int64), mask=of_chunk > 0, sem="relaxed")
