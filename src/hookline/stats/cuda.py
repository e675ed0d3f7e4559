# mypy: disable-error-code="import-not-found, import-untyped"
"""Launch the Triton kernels for statistics and histograms: all tensors of a dtype in one launch, without any wait."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from hookline import _device
from hookline._bins import BINS, PER_OCTAVE, PER_SIGN
from hookline.stats import kernels
from hookline.stats.layout import CHUNK_BYTES, VECTOR_BYTES, ChunkLayout, DtypeChunks, Launch, layout_of
from hookline.stats.rows import STATISTICS, wide_dtype

_SAME_NAME = ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
ELEMENTS: dict[torch.dtype, Any] = {getattr(torch, name): getattr(tl, name) for name in _SAME_NAME}
ELEMENTS[torch.bool] = tl.int8
WIDE: dict[torch.dtype, Any] = {torch.float32: tl.float32, torch.float64: tl.float64}
WARPS = 4
UNROLL = 4  # loads in flight at once, per thread
MERGE_TILE = 256
_DTYPE = attrgetter("dtype")


def summarize(tensors: Sequence[Tensor]) -> Tensor:
    """Return one statistics row per tensor, for tensors on one CUDA device."""
    device, tensors = tensors[0].device, all_readable(tensors)
    with _device.use(device):
        stream = _device.stream_handle(device)
        sizes, dtypes = tuple(map(Tensor.numel, tensors)), tuple(map(_DTYPE, tensors))
        chunks, reads, merge = _summary_launches(device, stream, sizes, dtypes)
        pointers = _device.cached_table(device, tuple(map(Tensor.data_ptr, tensors)))
        partials = torch.empty((kernels.PARTIAL_COLUMNS, chunks), dtype=torch.float64, device=device)
        rows = torch.empty((len(tensors), len(STATISTICS)), dtype=torch.float64, device=device)
        for read in reads:
            read(stream, pointers, partials)
        merge(stream, partials, rows)
    return rows


# Launches are cached for each device, because a compiled kernel belongs to one.


@lru_cache(maxsize=64)
def _summary_launches(
    device: torch.device, stream: int, sizes: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> tuple[int, list[Launch], Launch]:
    """Return the number of chunks, a launch for each dtype that reads them, and one that merges them."""
    layout = layout_of(device, stream, sizes, dtypes)
    reads = []
    for group in layout.groups:
        tile, wide = WARPS * 32 * VECTOR_BYTES // group.dtype.itemsize, WIDE[wide_dtype(group.dtype)]
        reads.append(_launch(kernels.read_chunks, layout, group, tile, layout.chunks, WIDE=wide, UNROLL=UNROLL))
    fixed = layout.first_chunks, layout.chunk_counts, layout.chunks
    merge = Launch(kernels.merge_chunks, len(sizes), *fixed, COLUMNS=len(STATISTICS), TILE=MERGE_TILE)
    return layout.chunks, reads, merge


def _launch(kernel: Any, layout: ChunkLayout, group: DtypeChunks, tile: int, *fixed: Any, **constants: Any) -> Launch:
    """Return a launch of a kernel that reads the chunks of one dtype; `fixed` and `constants` are further arguments."""
    item_bytes = group.dtype.itemsize
    return Launch(
        kernel, group.chunks, layout.sizes, layout.first_chunks, layout.owners, group.skipped, *fixed, num_warps=WARPS,
        ELEMENT=ELEMENTS[group.dtype], ITEM_BYTES=item_bytes, TILE=tile, TILES=CHUNK_BYTES // item_bytes // tile,
        **constants,
    )  # fmt: skip


def all_readable(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return each tensor as `readable` does; nearly always all of them already are, which is a quick check."""
    if all(map(Tensor.is_contiguous, tensors)) and ELEMENTS.keys() >= set(map(_DTYPE, tensors)):
        return tensors
    return [readable(tensor) for tensor in tensors]


def readable(tensor: Tensor) -> Tensor:
    """Return a tensor as memory that kernels can read from end to end; order does not matter, gaps and repeats do."""
    if tensor.dtype not in ELEMENTS:
        tensor = tensor.detach().to(wide_dtype(tensor.dtype))
    return tensor if tensor.is_contiguous() or is_dense(tensor) else tensor.detach().contiguous()


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements, in some order, fill one range of memory, as those of a transposed tensor do."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


# ---- histograms ------------------------------------------------------------------------------------------------------

HISTOGRAM_TILE = 2048  # More would cost registers, and so reduce the number of programs that run at the same time.
COPIES = 2  # Copies of the counters; each has an extra counter for lanes outside of the tensor.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_DECLARATION = (  # PTX; on other devices, and in the interpreter, Triton's own histogram counts.
    f".shared .align 16 .b32 hookline_counters[{COPIES * (BINS + 1)}]; mov.u32 $0, hookline_counters;"
    if torch.version.hip is None and not _INTERPRETED
    else None
)
_COUNTED = {torch.float16, torch.bfloat16, torch.float32}


def count(tensors: Sequence[Tensor], tops: Tensor) -> Tensor:
    """Return the histogram of each tensor, [tensors, bins], for tensors on one CUDA device."""
    device = tops.device
    if set(map(_DTYPE, tensors)) <= _COUNTED:
        tensors = all_readable(tensors)
    else:
        tensors = [in_float32(tensor) for tensor in tensors]
    with _device.use(device):
        stream = _device.stream_handle(device)
        pointers = _device.cached_table(device, tuple(map(Tensor.data_ptr, tensors)))
        counts = torch.zeros((len(tensors), BINS), dtype=torch.int64, device=device)
        sizes, dtypes = tuple(map(Tensor.numel, tensors)), tuple(map(_DTYPE, tensors))
        for launch in _count_launches(device, stream, sizes, dtypes):
            launch(stream, pointers, tops, counts)
    return counts


def in_float32(tensor: Tensor) -> Tensor:
    """Return a tensor with a dtype that float32 holds.

    Other values are clamped to its range; zeros stay zeros, and infinities stay infinities.
    """
    if tensor.dtype in _COUNTED:
        return readable(tensor)
    wide, limits = tensor.double(), torch.finfo(torch.float32)
    in_range = wide.sign() * wide.abs().clamp(limits.tiny, limits.max)
    return torch.where(wide.isinf(), wide, in_range).float().contiguous()


@lru_cache(maxsize=64)
def _count_launches(
    device: torch.device, stream: int, sizes: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> list[Launch]:
    """Return one launch for each dtype."""
    layout, scale = layout_of(device, stream, sizes, dtypes), {"PER_OCTAVE": PER_OCTAVE, "PER_SIGN": PER_SIGN}
    counters = {"DECLARATION": _DECLARATION, "COPIES": COPIES}
    return [
        _launch(kernels.count_chunks, layout, group, HISTOGRAM_TILE, BINS=BINS, **scale, **counters)
        for group in layout.groups
    ]
