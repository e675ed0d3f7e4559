# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
"""Triton kernels for histograms: count every chunk of every tensor once."""

from __future__ import annotations

import triton
import triton.language as tl

from hookline.stats.kernels import chunk_at, inside_of


@triton.jit
def _bin_of(value, highest, PER_OCTAVE: tl.constexpr, PER_SIGN: tl.constexpr):
    """Return the bin of each value, in the order that `hookline.stats.histograms` describes.

    The bits of a positive float32, read as a number, are its logarithm but for what bends between two powers of two. A
    cubic for that is right to 0.0009, a hundredth of a bin, for a quarter of the instructions of `tl.log2`.
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
