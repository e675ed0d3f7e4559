# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
"""The Triton kernels of tallies: add tensors to what was seen before them, and take out what many have seen.

A tally is float64 memory that outlives a launch: how often it was called and how often it added something, then the
partial results of a fixed number of shares, column by column. Each program of a launch has a share of its own, so that
no two of them write to one place and the sums have the same bits every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hookline.stats.kernels import chunk_at, finite_or_zero, merge_partials, partials_of, store_partials

HEAD: tl.constexpr = tl.constexpr(2)  # the two counts that stand before the shares


@triton.jit(do_not_specialize=["sizes", "tiles", "firsts", "addresses", "tallies"])
def add_to_tallies(
    sizes,
    tiles,
    firsts,
    due,
    addresses,
    tallies,
    ELEMENT: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    SLOTS: tl.constexpr,
    SHARES: tl.constexpr,
    TILE: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Add what this program reads of its tensor to its share; where the statistics are not due, only count the call.

    Each tensor has a slot in five tuples: how many elements it has, how many tiles a share of it, the first of its
    programs, its address and that of its tally. They come by value: a graph that is replayed finds no table again.
    """
    program, heard = tl.program_id(0), tl.load(due)
    size, length, first, address, place = sizes[0], tiles[0], firsts[0], addresses[0], tallies[0]
    for slot in tl.static_range(1, SLOTS):
        at_or_behind = program >= firsts[slot]
        size, length = tl.where(at_or_behind, sizes[slot], size), tl.where(at_or_behind, tiles[slot], length)
        first, address = tl.where(at_or_behind, firsts[slot], first), tl.where(at_or_behind, addresses[slot], address)
        place = tl.where(at_or_behind, tallies[slot], place)
    share = program - first
    tally = place.to(tl.pointer_type(tl.float64), bitcast=True)
    if share == 0:
        tl.store(tally, tl.load(tally) + 1)
        tl.store(tally + 1, tl.load(tally + 1) + heard)
    if heard != 0:
        WIDE: tl.constexpr = tl.float64 if ITEM_BYTES == 8 else tl.float32
        base, begin, end = chunk_at(address, size, share, ELEMENT, ITEM_BYTES, TILE * length)
        if begin < end:
            count, mean, squares, low, high, zeros, nans, infs = partials_of(
                base, begin, end, length, WIDE, TILE, UNROLL
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
    """Write one tally's row, add to its two counts, and begin it anew; one that added nothing has NaN for a count."""
    number = tl.program_id(0)
    tally = tl.load(tallies + number).to(tl.pointer_type(tl.float64), bitcast=True)
    row, count, shares = rows + number * COLUMNS, counts + number * HEAD, tally + HEAD
    called, heard = tl.load(tally), tl.load(tally + 1)
    merge_partials(shares, SHARES, SHARES, row, TILE)
    if heard == 0:
        tl.store(row, float("nan"))
    tl.store(count, tl.load(count) + called)
    tl.store(count + 1, tl.load(count + 1) + heard)
    lanes = tl.arange(0, TILE)
    tl.debug_barrier()  # all threads have read
    tl.store(tally + lanes, 0.0, mask=lanes < HEAD)
    for start in range(0, SHARES, TILE):
        tl.store(shares + start + lanes, 0.0, mask=start + lanes < SHARES)
