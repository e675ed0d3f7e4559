"""Counting histograms on CUDA: all tensors of one dtype in one launch; nothing waits for the device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter

import torch
from torch import Tensor

from hookline.stats import histograms
from hookline.stats.columns import ABSMAX
from hookline.stats.cuda_path import ELEMENTS, all_readable, readable
from hookline.stats.histogram_kernels import count_chunks, find_tops, look_up
from hookline.stats.launching import Launch
from hookline.stats.layout import CHUNK_BYTES, Group, current_stream, kept_table, layout_of

WARPS = 4
TILE = 2048  # more would cost registers and with them programs at work at the same time
TOGETHER = 256  # tensors whose windows one program finds
COPIES = 2  # of the counters, each with one more for what is no element
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_DECLARATION = (  # PTX: on other devices, and in the interpreter, Triton's own histogram counts
    f".shared .align 16 .b32 hookline_counters[{COPIES * (histograms.BINS + 1)}]; mov.u32 $0, hookline_counters;"
    if torch.version.hip is None and not _INTERPRETED
    else None
)
_COUNTED = {torch.float16, torch.bfloat16, torch.float32}
_DTYPE = attrgetter("dtype")
_SCALE = {"BINS": histograms.BINS, "PER_OCTAVE": histograms.PER_OCTAVE, "PER_SIGN": histograms.PER_SIGN}


def count(tensors: Sequence[Tensor], tops: Tensor) -> Tensor:
    """The counts of each tensor, for tensors that are all on one CUDA device."""
    device = tops.device
    with torch.cuda.device(device):
        return launch(all_in_float32(tensors), tops, current_stream(device))


def all_in_float32(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Each as `in_float32` gives it; nearly always all of them are so already."""
    if set(map(_DTYPE, tensors)) <= _COUNTED:
        return all_readable(tensors)
    return [in_float32(tensor) for tensor in tensors]


def in_float32(tensor: Tensor) -> Tensor:
    """The tensor in a dtype that float32 holds; other values are brought into its range, zeros and infinities stay."""
    if tensor.dtype in _COUNTED:
        return readable(tensor)
    wide, limits = tensor.double(), torch.finfo(torch.float32)
    in_range = wide.sign() * wide.abs().clamp(limits.tiny, limits.max)
    return torch.where(wide.isinf(), wide, in_range).float().contiguous()


def launch(tensors: Sequence[Tensor], tops: Tensor, stream: int) -> Tensor:
    """Queue the kernels for tensors that can be read as flat memory."""
    pointers = kept_table(tops.device, tuple(map(Tensor.data_ptr, tensors)))
    counts = torch.zeros((len(tensors), histograms.BINS), dtype=torch.int64, device=tops.device)
    sizes, dtypes = tuple(map(Tensor.numel, tensors)), tuple(map(_DTYPE, tensors))
    for count_group in _counting(tops.device, stream, sizes, dtypes):
        count_group(stream, pointers, tops, counts)
    return counts


@lru_cache(maxsize=64)
def _counting(
    device: torch.device, stream: int, sizes: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> list[Launch]:
    """The launches for tensors of these sizes and dtypes, one for each dtype."""
    layout = layout_of(device, stream, sizes, dtypes)
    tables = layout.sizes, layout.first_chunks, layout.owners
    return [_count_group(group, tables) for group in layout.groups]


def _count_group(group: Group, tables: tuple[Tensor, ...]) -> Launch:
    return Launch(
        count_chunks,
        group.chunks,
        *tables,
        group.skipped,
        num_warps=WARPS,
        ELEMENT=ELEMENTS[group.dtype],
        ITEM_BYTES=group.dtype.itemsize,
        TILE=TILE,
        TILES=CHUNK_BYTES // group.dtype.itemsize // TILE,
        **_SCALE,
        DECLARATION=_DECLARATION,
        COPIES=COPIES,
    )


def tops_of(rows: Tensor) -> Tensor:
    """The octave in which each tensor's window ends, in one launch, where torch operations would be seven."""
    tops = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
    _finding_tops(rows.device, *rows.shape)(current_stream(rows.device), rows.contiguous(), tops)
    return tops


@lru_cache(maxsize=64)
def _finding_tops(device: torch.device, tensors: int, columns: int) -> Launch:
    """Launches are kept for each device, because what was compiled belongs to one."""
    return Launch(
        find_tops,
        -(-tensors // TOGETHER),
        tensors,
        COLUMNS=columns,
        ABSMAX=ABSMAX,
        LOWEST=histograms.LOWEST_TOP,
        HIGHEST=histograms.HIGHEST_TOP,
        USUAL=histograms.USUAL_TOP,
        TILE=TOGETHER,
    )


def percentiles(counts: Tensor, tops: Tensor, fractions: Tensor) -> Tensor:
    """The percentiles of each tensor in one launch, where torch operations would be thirty."""
    found = torch.empty((len(counts), len(fractions)), dtype=torch.float64, device=counts.device)
    _looking_up(counts.device, *found.shape)(current_stream(counts.device), counts, tops, fractions, found)
    return found


@lru_cache(maxsize=64)
def _looking_up(device: torch.device, tensors: int, points: int) -> Launch:
    return Launch(look_up, tensors, points, **_SCALE)
