# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
"""The Triton kernels of tallies: add one tensor to what was seen before it, and take out what many have seen.

A tally is float64 memory that outlives a launch: how often it was called and how often it added something, then the
partial results of a fixed number of shares, column by column. Each program of a launch has a share of its own, so that
no two of them write to one place and the sums have the same bits every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hookline.stats.kernels import chunk_at, finite_or_zero, merge_partials, partials_of, store_partials

HEAD: tl.constexpr = tl.constexpr(2)  # the two counts that stand before the shares


@triton.jit
def add_to_tally(tensor, tally, due, size, SHARES: tl.constexpr, VECTOR_LANES: tl.constexpr, UNROLL: tl.constexpr):
    """Add what this program reads of a tensor to its share; where the statistics are not due, only count the call."""
    share, heard = tl.program_id(0), tl.load(due)
    if share == 0:
        tl.store(tally, tl.load(tally) + 1)
        tl.store(tally + 1, tl.load(tally + 1) + heard)
    if heard != 0:
        ELEMENT: tl.constexpr = tensor.dtype.element_ty
        ITEM_BYTES: tl.constexpr = ELEMENT.primitive_bitwidth // 8
        WIDE: tl.constexpr = tl.float64 if ITEM_BYTES == 8 else tl.float32
        TILE: tl.constexpr = VECTOR_LANES * 16 // ITEM_BYTES
        tiles = tl.cdiv(tl.cdiv(size + 16 // ITEM_BYTES, SHARES), TILE * UNROLL) * UNROLL
        address = tensor.to(tl.int64, bitcast=True)
        base, begin, end = chunk_at(address, size, share, ELEMENT, ITEM_BYTES, TILE * tiles)
        if begin < end:
            count, mean, squares, low, high, zeros, nans, infs = partials_of(
                base, begin, end, tiles, WIDE, TILE, UNROLL
            )
            _add_partials(tally + HEAD + share, SHARES, count, mean, squares, low, high, zeros, nans, infs)


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
def take_tallies(tallies, rows, counts, COLUMNS: tl.constexpr, SHARES: tl.constexpr, TILE: tl.constexpr):
    """Write one tally's row and its two counts, and begin it anew; one that added nothing has NaN for a count."""
    number = tl.program_id(0)
    tally = tl.load(tallies + number).to(tl.pointer_type(tl.float64), bitcast=True)
    row, shares = rows + number * COLUMNS, tally + HEAD
    called, heard = tl.load(tally), tl.load(tally + 1)
    merge_partials(shares, SHARES, SHARES, row, TILE)
    if heard == 0:
        tl.store(row, float("nan"))
    tl.store(counts + number * 2, called)
    tl.store(counts + number * 2 + 1, heard)
    lanes = tl.arange(0, TILE)
    tl.debug_barrier()  # all threads have read
    tl.store(tally + lanes, 0.0, mask=lanes < HEAD)
    for start in range(0, SHARES, TILE):
        tl.store(shares + start + lanes, 0.0, mask=start + lanes < SHARES)
