"""Counting histograms on CUDA: all tensors of one dtype in one launch; nothing waits for the device."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from hookline.stats import histograms
from hookline.stats.cuda_path import ELEMENTS, readable
from hookline.stats.histogram_kernels import count_chunks, look_up
from hookline.stats.layout import CHUNK_BYTES, Group, Layout, kept_table, layout_of

WARPS = 4
TILE = 2048  # more would cost registers and with them programs at work at the same time
COPIES = 2  # of the counters, each with one more for what is no element
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_DECLARATION = (  # PTX: on other devices, and in the interpreter, Triton's own histogram counts
    f".shared .align 16 .b32 hookline_counters[{COPIES * (histograms.BINS + 1)}]; mov.u32 $0, hookline_counters;"
    if torch.version.hip is None and not _INTERPRETED
    else None
)
_COUNTED = (torch.float16, torch.bfloat16, torch.float32)


def count(tensors: Sequence[Tensor], tops: Tensor) -> Tensor:
    """The counts of each tensor, for tensors that are all on one CUDA device."""
    device = tops.device
    with torch.cuda.device(device):
        return launch([in_float32(tensor) for tensor in tensors], tops, torch.cuda.current_stream().cuda_stream)


def in_float32(tensor: Tensor) -> Tensor:
    """The tensor in a dtype that float32 holds; other values are brought into its range, zeros and infinities stay."""
    if tensor.dtype in _COUNTED:
        return readable(tensor)
    wide, limits = tensor.double(), torch.finfo(torch.float32)
    in_range = wide.sign() * wide.abs().clamp(limits.tiny, limits.max)
    return torch.where(wide.isinf(), wide, in_range).float().contiguous()


def launch(tensors: Sequence[Tensor], tops: Tensor, stream: int) -> Tensor:
    """Queue the kernels for tensors that can be read as flat memory."""
    sizes, dtypes = tuple([tensor.numel() for tensor in tensors]), tuple([tensor.dtype for tensor in tensors])
    layout = layout_of(tops.device, stream, sizes, dtypes)
    pointers = kept_table(tops.device, tuple([tensor.data_ptr() for tensor in tensors]))
    counts = torch.zeros((len(tensors), histograms.BINS), dtype=torch.int64, device=tops.device)
    for group in layout.groups:
        _count(group, layout, pointers, tops, counts)
    return counts


def _count(group: Group, layout: Layout, pointers: Tensor, tops: Tensor, counts: Tensor) -> None:
    count_chunks[(group.chunks,)](
        pointers,
        layout.sizes,
        layout.first_chunks,
        layout.owners,
        tops,
        counts,
        group.skipped,
        ELEMENT=ELEMENTS[group.dtype],
        ITEM_BYTES=group.dtype.itemsize,
        TILE=TILE,
        TILES=CHUNK_BYTES // group.dtype.itemsize // TILE,
        BINS=histograms.BINS,
        PER_OCTAVE=histograms.PER_OCTAVE,
        PER_SIGN=histograms.PER_SIGN,
        DECLARATION=_DECLARATION,
        COPIES=COPIES,
        num_warps=WARPS,
    )


def percentiles(counts: Tensor, tops: Tensor, fractions: Tensor) -> Tensor:
    """The percentiles of each tensor in one launch, where torch operations would be thirty."""
    found = torch.empty((len(counts), len(fractions)), dtype=torch.float64, device=counts.device)
    look_up[(len(counts),)](
        counts,
        tops,
        fractions,
        found,
        len(fractions),
        BINS=histograms.BINS,
        PER_OCTAVE=histograms.PER_OCTAVE,
        PER_SIGN=histograms.PER_SIGN,
    )
    return found
