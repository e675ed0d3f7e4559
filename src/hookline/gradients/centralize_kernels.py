# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
"""Triton kernels that centralize rows: each is read once, written once, and its norm found on the way."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _take_mean_at_once(memory, begin, inside, length, ELEMENT: tl.constexpr, TILE: tl.constexpr):
    """Centralize rows that fit into registers; return the sum of squares of what was written."""
    columns = tl.arange(0, TILE)
    places = memory + begin[:, None] + columns[None, :]
    here = inside[:, None] & (columns < length)[None, :]
    values = tl.load(places, mask=here, other=0).to(tl.float32)
    mean = tl.sum(values, axis=1) / length
    centred = (values - mean[:, None]).to(ELEMENT)
    tl.store(places, centred, mask=here)
    written = tl.where(here, centred.to(tl.float32), 0.0)
    return tl.sum(tl.sum(written * written, axis=1), axis=0)


@triton.jit
def _take_mean_in_tiles(memory, begin, inside, length, ELEMENT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Centralize longer rows, which are read twice; the second time they mostly come from the cache."""
    columns = tl.arange(0, TILE)
    total = tl.zeros([ROWS, TILE], tl.float32)
    for start in range(0, length, TILE):
        here = inside[:, None] & (start + columns < length)[None, :]
        total += tl.load(memory + begin[:, None] + start + columns[None, :], mask=here, other=0).to(tl.float32)
    mean = tl.sum(total, axis=1) / length
    squares = tl.zeros([ROWS, TILE], tl.float32)
    for start in range(0, length, TILE):
        here = inside[:, None] & (start + columns < length)[None, :]
        places = memory + begin[:, None] + start + columns[None, :]
        centred = (tl.load(places, mask=here, other=0).to(tl.float32) - mean[:, None]).to(ELEMENT)
        tl.store(places, centred, mask=here)
        written = tl.where(here, centred.to(tl.float32), 0.0)
        squares += written * written
    return tl.sum(tl.sum(squares, axis=1), axis=0)


@triton.jit(do_not_specialize=["skipped"])
def centralize_rows(
    owners,
    first_rows,
    row_counts,
    skipped,
    length,
    pointers,
    squares,
    ELEMENT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    VECTOR: tl.constexpr,  # elements that one thread loads at once; rows begin at such boundaries
):
    """Subtract the mean from some rows of one tensor, all of one length, in each program."""
    program = tl.program_id(0) + skipped
    owner = tl.load(owners + program)
    memory = tl.load(pointers + owner).to(tl.pointer_type(ELEMENT), bitcast=True)
    rows = tl.load(first_rows + program) + tl.arange(0, ROWS)
    inside = rows < tl.load(row_counts + owner)
    if VECTOR > 1:
        memory = tl.multiple_of(memory, 16)  # bytes
        length = length // VECTOR * VECTOR  # no change; said so that the compiler knows, or each element is a load
    begin = rows.to(tl.int64) * length
    if AT_ONCE:
        found = _take_mean_at_once(memory, begin, inside, length, ELEMENT, TILE)
    else:
        found = _take_mean_in_tiles(memory, begin, inside, length, ELEMENT, ROWS, TILE)
    tl.store(squares + program, found)


@triton.jit(do_not_specialize=["skipped"])
def square_elements(
    owners, first_elements, sizes, skipped, pointers, squares, ELEMENT: tl.constexpr, TILE: tl.constexpr
):
    """Add up the squares of some elements of one tensor in each program; writes nothing to the tensor."""
    program = tl.program_id(0) + skipped
    owner = tl.load(owners + program)
    memory = tl.load(pointers + owner).to(tl.pointer_type(ELEMENT), bitcast=True)
    places = tl.load(first_elements + program) + tl.arange(0, TILE)
    values = tl.load(memory + places, mask=places < tl.load(sizes + owner), other=0).to(tl.float32)
    tl.store(squares + program, tl.sum(values * values))


@triton.jit
def norms_of_tensors(first_programs, program_counts, squares, norms, TILE: tl.constexpr):
    """Turn the squares that the programs of each tensor found into its norm, added up in a fixed order."""
    tensor = tl.program_id(0)
    first, count = tl.load(first_programs + tensor), tl.load(program_counts + tensor)
    lanes = tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float64)
    for start in range(0, count, TILE):
        here = start + lanes < count
        total += tl.load(squares + first + start + lanes, mask=here, other=0).to(tl.float64)
    tl.store(norms + tensor, tl.sqrt(tl.sum(total)).to(tl.float32))
