# mypy: disable-error-code="import-not-found, import-untyped"
"""Centralizing on CUDA: all matrices in one launch for each dtype and row length, and all norms on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
import triton
from torch import Tensor

from hookline.gradients import row_kernels
from hookline.gradients.look import Look
from hookline.stats.cuda_path import ELEMENTS
from hookline.stats.kinds import Kinds
from hookline.stats.launching import Launch
from hookline.stats.layout import VECTOR_BYTES, current_stream, on_device, upload

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
AT_ONCE = 8192  # elements of a row that one program holds in its registers
TOGETHER = 4096  # elements that one program takes of shorter rows, and of what has no rows
NO_ROWS = 0  # the row length of vectors and scalars, whose elements count as rows; they are only read
MOST_ROWS = 2**31 - TOGETHER
WARPS = 8
MERGE_TILE = 1024


@dataclass(frozen=True)
class Group:
    """The programs for rows of one dtype and length: they stand together, because a launch is about such."""

    dtype: torch.dtype
    length: int
    rows: int  # that one program takes
    tile: int  # elements of a row that it takes at once
    skipped: int
    programs: int


@dataclass(frozen=True)
class Layout:
    """Which program takes which rows; everything about the launches except where the tensors are."""

    take_means: tuple[Launch, ...]  # from pointers to squares, one for each group
    find_norms: Launch  # from squares to norms
    matrices: tuple[int, ...]  # which of the tensors have rows
    programs: int


def which_fit(look: Look) -> tuple[Look, list[Tensor]]:
    """Those that the kernels can take, for their rows lie one after the other, and the others."""
    if all_fit(look.kinds):
        return look, []  # nearly always, and quicker than a look at each
    fitting = [tensor for tensor in look.tensors if tensor.is_contiguous() and _fits(tensor.shape, tensor.dtype)]
    taken = set(map(id, fitting))
    return Look(fitting), [tensor for tensor in look.tensors if id(tensor) not in taken]


@lru_cache(maxsize=16)
def all_fit(kinds: Kinds) -> bool:
    """Whether the kernels can take all tensors of these kinds."""
    return kinds.contiguous and all(map(_fits, kinds.shapes, kinds.dtypes))


def _fits(shape: torch.Size, dtype: torch.dtype) -> bool:
    countable = len(shape) > 1 or shape.numel() < MOST_ROWS
    return dtype in DTYPES and shape.numel() > 0 and countable


def centralize(look: Look) -> Tensor:
    """Take from each row of each matrix its mean, in place; returns the norms of what is left, and of the vectors.

    All of them fit and are on one device.
    """
    device = look.tensors[0].device
    with torch.cuda.device(device):
        return launch(look, device)


def launch(look: Look, device: torch.device) -> Tensor:
    """Queue the kernels; nothing waits for the device."""
    tensors, stream = look.tensors, current_stream(device)
    layout = layout_of(device, stream, look.kinds, look.aligned)
    pointers = look.pointers(device)
    squares = torch.empty(layout.programs, dtype=torch.float32, device=device)
    norms = torch.empty(len(tensors), dtype=torch.float32, device=device)
    for take_means in layout.take_means:
        take_means(stream, pointers, squares)
    layout.find_norms(stream, squares, norms)
    torch.autograd.graph.increment_version([tensors[i] for i in layout.matrices])  # else the writing goes unseen
    return norms


@lru_cache(maxsize=16)
def layout_of(device: torch.device, stream: int, kinds: Kinds, aligned: bool) -> Layout:
    """The layout for tensors of these kinds; `aligned` ones begin at boundaries of vectors.

    The stream is in the key because the tables are filled in its order: another stream might read them too early.
    """
    shapes, dtypes = [_rows_and_length(shape) for shape in kinds.shapes], kinds.dtypes
    order = sorted(range(len(shapes)), key=lambda index: (str(dtypes[index]), shapes[index][1]))
    taken = [max(TOGETHER // triton.next_power_of_2(length or 1), 1) for _, length in shapes]
    counts = [-(-rows // taken[index]) for index, (rows, _) in enumerate(shapes)]
    starts = [0, *accumulate(counts[index] for index in order)]
    first = [0] * len(shapes)
    for position, index in enumerate(order):
        first[index] = starts[position]
    owners = torch.repeat_interleave(torch.tensor(order), torch.tensor([counts[index] for index in order]))
    numbers = torch.arange(starts[-1]) - torch.tensor(first)[owners]
    tables = (
        on_device(owners.int(), device),
        on_device((numbers * torch.tensor(taken)[owners]).int(), device),  # the first row of each program
        upload([rows for rows, _ in shapes], torch.int32, device),
    )
    programs = upload(first, torch.int32, device), upload(counts, torch.int32, device)  # of each tensor
    groups = _groups(order, shapes, dtypes, taken, counts)
    return Layout(
        take_means=tuple(_take_means(group, tables, aligned) for group in groups),
        find_norms=Launch(row_kernels.norms_of_tensors, len(shapes), *programs, TILE=MERGE_TILE),
        matrices=tuple(index for index, (_, length) in enumerate(shapes) if length != NO_ROWS),
        programs=starts[-1],
    )


def _take_means(group: Group, tables: tuple[Tensor, ...], aligned: bool) -> Launch:
    element = ELEMENTS[group.dtype]
    if group.length == NO_ROWS:
        fixed = (row_kernels.square_elements, group.programs, *tables, group.skipped)
        return Launch(*fixed, num_warps=WARPS, ELEMENT=element, TILE=TOGETHER)
    vector = VECTOR_BYTES // group.dtype.itemsize
    return Launch(
        row_kernels.centralize_rows,
        group.programs,
        *tables,
        group.skipped,
        group.length,
        num_warps=WARPS,
        ELEMENT=element,
        ROWS=group.rows,
        TILE=group.tile,
        AT_ONCE=group.length <= group.tile,
        VECTOR=vector if aligned and group.length % vector == 0 else 1,
    )


def _rows_and_length(shape: torch.Size) -> tuple[int, int]:
    return (shape[0], shape.numel() // shape[0]) if len(shape) > 1 else (shape.numel(), NO_ROWS)


def _groups(
    order: Sequence[int],
    shapes: Sequence[tuple[int, int]],
    dtypes: Sequence[torch.dtype],
    taken: Sequence[int],
    counts: Sequence[int],
) -> tuple[Group, ...]:
    programs: dict[tuple[torch.dtype, int, int, int], int] = {}
    for index in order:
        length = shapes[index][1]
        kind = (dtypes[index], length, taken[index], min(triton.next_power_of_2(length or 1), AT_ONCE))
        programs[kind] = programs.get(kind, 0) + counts[index]
    starts = accumulate(programs.values(), initial=0)
    return tuple(Group(*kind, start, count) for (kind, count), start in zip(programs.items(), starts, strict=False))
