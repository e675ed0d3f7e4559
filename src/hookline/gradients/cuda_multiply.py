# mypy: disable-error-code="import-not-found, import-untyped"
"""Multiplying on CUDA: all gradients in one launch, bit for bit what torch's operations give."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline.gradients.look import Look
from hookline.gradients.multiply_kernels import clip_chunks, multiply_chunks
from hookline.gradients.row_kernels import norms_of_tensors
from hookline.stats.cuda_path import ELEMENTS
from hookline.stats.kinds import Kinds
from hookline.stats.launching import Launch
from hookline.stats.layout import VECTOR_BYTES, current_stream, layout_of

DTYPES = {torch.float32, torch.bfloat16, torch.float16}
WARPS = 8
TILE_BYTES = WARPS * 32 * VECTOR_BYTES
TILES = 2  # more at a time are no faster
MERGE_TILE = 256


class Launches(NamedTuple):
    """What can be done with tensors of some kinds."""

    clip: Launch
    multiply: Launch
    find_norms: Launch
    chunks: int


@lru_cache(maxsize=64)
def can_multiply(kinds: Kinds) -> bool:
    """Whether the kernels can take them: the elements of each lie one after the other, and there are some."""
    fit = kinds.alike and kinds.plain and kinds.contiguous and DTYPES.issuperset(kinds.dtypes)
    return fit and any(shape.numel() for shape in kinds.shapes)


def clip_(look: Look, norm: Tensor, limit: float) -> Tensor:
    """Multiply all by ``limit / (norm + 1e-6)``, at most 1, in place; returns that factor. The norm has their dtype."""
    device = look.tensors[0].device
    with torch.cuda.device(device):
        return launch_clip(look, norm, limit, device)


def multiply_(look: Look, factor: float) -> Tensor:
    """Multiply all by a number, in place; returns the norm of each afterwards."""
    device = look.tensors[0].device
    with torch.cuda.device(device):
        return launch_multiply(look, factor, device)


def launch_clip(look: Look, norm: Tensor, limit: float, device: torch.device) -> Tensor:
    """Queue the kernel; nothing waits for the device."""
    stream = current_stream(device)
    factor = torch.empty_like(norm)
    prepare(device, stream, look.kinds, look.aligned).clip(stream, look.pointers(device), norm, factor, float(limit))
    torch.autograd.graph.increment_version(look.tensors)  # else the writing goes unseen
    return factor


def launch_multiply(look: Look, factor: float, device: torch.device) -> Tensor:
    """Queue the kernels; nothing waits for the device."""
    stream = current_stream(device)
    launches = prepare(device, stream, look.kinds, look.aligned)
    squares = torch.empty(launches.chunks, dtype=torch.float32, device=device)
    norms = torch.empty(len(look.tensors), dtype=torch.float32, device=device)
    launches.multiply(stream, look.pointers(device), squares, float(factor))
    launches.find_norms(stream, squares, norms)
    torch.autograd.graph.increment_version(look.tensors)
    return norms


@lru_cache(maxsize=16)
def prepare(device: torch.device, stream: int, kinds: Kinds, aligned: bool) -> Launches:
    """The launches for tensors of these kinds; `aligned` ones begin at boundaries of vectors."""
    sizes, dtype = tuple(shape.numel() for shape in kinds.shapes), kinds.dtypes[0]
    layout = layout_of(device, stream, sizes, kinds.dtypes, TILES * TILE_BYTES)
    tables = layout.sizes, layout.first_chunks, layout.owners
    constants: dict[str, Any] = {"ELEMENT": ELEMENTS[dtype], "TILE": TILE_BYTES // dtype.itemsize, "TILES": TILES}
    return Launches(
        clip=Launch(clip_chunks, layout.chunks, *tables, num_warps=WARPS, **constants, ALIGNED=aligned),
        multiply=Launch(multiply_chunks, layout.chunks, *tables, num_warps=WARPS, **constants, ALIGNED=aligned),
        find_norms=Launch(norms_of_tensors, len(sizes), layout.first_chunks, layout.chunk_counts, TILE=MERGE_TILE),
        chunks=layout.chunks,
    )
