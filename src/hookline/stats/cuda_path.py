# mypy: disable-error-code="import-not-found, import-untyped"
"""The CUDA path: all tensors read in one launch per dtype, merged in another; nothing waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from hookline.stats import kernels
from hookline.stats.columns import STATISTICS, wide_dtype
from hookline.stats.layout import CHUNK_BYTES, VECTOR_BYTES, Group, Layout, kept_table, layout_of

ELEMENTS: dict[torch.dtype, Any] = {
    torch.bool: tl.int8,
    torch.uint8: tl.uint8,
    torch.int8: tl.int8,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
WIDE: dict[torch.dtype, Any] = {torch.float32: tl.float32, torch.float64: tl.float64}
WARPS = 4
UNROLL = 4  # loads that are on their way at once, per thread
MERGE_TILE = 256
_DTYPE = attrgetter("dtype")


def summarize(tensors: Sequence[Tensor]) -> Tensor:
    """One row of statistics per tensor, for tensors that are all on one CUDA device."""
    device = tensors[0].device
    with torch.cuda.device(device):
        return launch(all_readable(tensors), device, torch.cuda.current_stream().cuda_stream)


def launch(tensors: Sequence[Tensor], device: torch.device, stream: int) -> Tensor:
    """Queue the kernels for tensors that can be read as flat memory."""
    layout = layout_of(device, stream, tuple(map(Tensor.numel, tensors)), tuple(map(_DTYPE, tensors)))
    pointers = kept_table(device, tuple(map(Tensor.data_ptr, tensors)))
    partials = torch.empty((kernels.PARTIAL_COLUMNS, layout.chunks), dtype=torch.float64, device=device)
    rows = torch.empty((len(tensors), len(STATISTICS)), dtype=torch.float64, device=device)
    for group in layout.groups:
        _read(group, layout, pointers, partials)
    kernels.merge_chunks[(len(tensors),)](
        layout.first_chunks,
        layout.chunk_counts,
        partials,
        rows,
        layout.chunks,
        COLUMNS=len(STATISTICS),
        TILE=MERGE_TILE,
    )
    return rows


def _read(group: Group, layout: Layout, pointers: Tensor, partials: Tensor) -> None:
    tile = WARPS * 32 * VECTOR_BYTES // group.dtype.itemsize
    kernels.read_chunks[(group.chunks,)](
        pointers,
        layout.sizes,
        layout.first_chunks,
        layout.owners,
        partials,
        group.skipped,
        layout.chunks,
        ELEMENT=ELEMENTS[group.dtype],
        ITEM_BYTES=group.dtype.itemsize,
        WIDE=WIDE[wide_dtype(group.dtype)],
        TILE=tile,
        TILES=CHUNK_BYTES // group.dtype.itemsize // tile,
        UNROLL=UNROLL,
        num_warps=WARPS,
    )


def all_readable(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Each as `readable` gives it; nearly always all of them are so already, which is quickly seen."""
    if all(map(Tensor.is_contiguous, tensors)) and ELEMENTS.keys() >= set(map(_DTYPE, tensors)):
        return tensors
    return [readable(tensor) for tensor in tensors]


def readable(tensor: Tensor) -> Tensor:
    """The tensor as memory that kernels can read from end to end; order does not matter, gaps and repeats do."""
    if tensor.dtype not in ELEMENTS:
        tensor = tensor.detach().to(wide_dtype(tensor.dtype))
    return tensor if tensor.is_contiguous() or is_dense(tensor) else tensor.detach().contiguous()


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements, in some order, fill one stretch of memory, as those of a transposed tensor do."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
