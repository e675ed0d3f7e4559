# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
"""The Triton kernels that multiply: each program takes one chunk of one tensor, as much as belongs to the tensor."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def factor_of(norm, limit, ELEMENT: tl.constexpr):
    """limit / (norm + 1e-6), at most 1; in steps that are rounded one by one, as torch's operations on a scalar are."""
    shifted = (norm.to(tl.float32) + 1e-6).to(ELEMENT).to(tl.float32)
    inverse = tl.div_rn(1.0, shifted).to(ELEMENT).to(tl.float32)
    factor = (inverse * limit).to(ELEMENT).to(tl.float32)
    return tl.minimum(factor, 1.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _chunk(sizes, first_chunks, owners, pointers, ELEMENT: tl.constexpr, ELEMENTS: tl.constexpr, ALIGNED: tl.constexpr):
    """Where the program's chunk begins, and how many elements the tensor has from there on."""
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    begin = (program - tl.load(first_chunks + owner)).to(tl.int64) * ELEMENTS
    memory = tl.load(pointers + owner).to(tl.pointer_type(ELEMENT), bitcast=True)
    if ALIGNED:  # whether all tensors begin at a boundary of 16 bytes
        memory = tl.multiple_of(memory, 16)
    return memory + begin, tl.load(sizes + owner) - begin


@triton.jit
def _multiply(base, left, factor, ELEMENT: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
    """Multiply one chunk; returns the sum of squares of what was written."""
    lanes, squares = tl.arange(0, TILE), tl.zeros([TILE], tl.float32)
    if left >= TILE * TILES:
        for tile in tl.static_range(TILES):
            places = base + tile * TILE + lanes
            product = (tl.load(places).to(tl.float32) * factor).to(ELEMENT)
            tl.store(places, product)
            squares += product.to(tl.float32) * product.to(tl.float32)
    else:
        for start in range(0, left, TILE):
            places, inside = base + start + lanes, start + lanes < left
            product = (tl.load(places, mask=inside, other=0).to(tl.float32) * factor).to(ELEMENT)
            tl.store(places, product, mask=inside)
            squares += tl.where(inside, product.to(tl.float32) * product.to(tl.float32), 0.0)
    return tl.sum(squares)


@triton.jit(do_not_specialize=["limit"])
def clip_chunks(
    sizes,
    first_chunks,
    owners,
    pointers,
    norm,
    factor_found,
    limit,
    ELEMENT: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Find the factor from the norm, and multiply."""
    program = tl.program_id(0)
    factor = factor_of(tl.load(norm), limit, ELEMENT)
    if program == 0:
        tl.store(factor_found, factor.to(ELEMENT))
    base, left = _chunk(sizes, first_chunks, owners, pointers, ELEMENT, TILE * TILES, ALIGNED)
    _multiply(base, left, factor, ELEMENT, TILE, TILES)


@triton.jit(do_not_specialize=["factor"])
def multiply_chunks(
    sizes,
    first_chunks,
    owners,
    pointers,
    squares,
    factor,
    ELEMENT: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Multiply, and note the sum of squares of what was written."""
    base, left = _chunk(sizes, first_chunks, owners, pointers, ELEMENT, TILE * TILES, ALIGNED)
    tl.store(squares + tl.program_id(0), _multiply(base, left, factor, ELEMENT, TILE, TILES))
