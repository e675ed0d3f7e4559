# mypy: disable-error-code="import-not-found, import-untyped"
"""Centralizing on CUDA: all matrices in one launch for each dtype and row length, and all norms on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import accumulate
from operator import attrgetter, or_

import torch
import triton
from torch import Tensor

from hookline.gradients import row_kernels
from hookline.stats.cuda_path import ELEMENTS
from hookline.stats.layout import VECTOR_BYTES, current_stream, kept_table, on_device, upload

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
AT_ONCE = 8192  # elements of a row that one program holds in its registers
TOGETHER = 4096  # elements that one program takes of shorter rows, and of what has no rows
NO_ROWS = 0  # the row length of vectors and scalars, whose elements count as rows; they are only read
MOST_ROWS = 2**31 - TOGETHER
WARPS = 8
MERGE_TILE = 1024
_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")


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
    """Which program takes which rows; everything about a launch except where the tensors are."""

    groups: tuple[Group, ...]
    matrices: tuple[int, ...]  # which of the tensors have rows
    programs: int
    owners: Tensor  # int32, the tensor of each program
    first_rows: Tensor  # int32, of each program
    row_counts: Tensor  # int32, of each tensor
    first_programs: Tensor  # int32, of each tensor
    program_counts: Tensor  # int32, of each tensor


def which_fit(tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Those that the kernels can take, for their rows lie one after the other, and the others."""
    kinds, sizes = set(map(_DTYPE, tensors)), set(map(Tensor.numel, tensors))
    if all(map(Tensor.is_contiguous, tensors)) and kinds.issubset(DTYPES) and 0 < min(sizes) <= max(sizes) < MOST_ROWS:
        return tensors, []  # nearly always, and quicker than a look at each
    fitting = [tensor for tensor in tensors if _fits(tensor)]
    return fitting, [tensor for tensor in tensors if not _fits(tensor)]


def _fits(tensor: Tensor) -> bool:
    countable = tensor.dim() > 1 or tensor.numel() < MOST_ROWS
    return tensor.dtype in DTYPES and tensor.is_contiguous() and tensor.numel() > 0 and countable


def centralize(tensors: Sequence[Tensor]) -> Tensor:
    """Take from each row of each matrix its mean, in place; returns the norms of what is left, and of the vectors.

    All of them fit and are on one device.
    """
    device = tensors[0].device
    with torch.cuda.device(device):
        return launch(tensors, device)


def launch(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Queue the kernels; nothing waits for the device."""
    layout = layout_of(device, current_stream(device), tuple(map(_SHAPE, tensors)), tuple(map(_DTYPE, tensors)))
    addresses = tuple(map(Tensor.data_ptr, tensors))
    pointers = kept_table(device, addresses)
    squares = torch.empty(layout.programs, dtype=torch.float32, device=device)
    norms = torch.empty(len(tensors), dtype=torch.float32, device=device)
    aligned = reduce(or_, addresses) % VECTOR_BYTES == 0
    for group in layout.groups:
        if group.length == NO_ROWS:
            _only_read(group, layout, pointers, squares)
        else:
            _take_means(group, layout, pointers, squares, aligned)
    tables = layout.first_programs, layout.program_counts
    row_kernels.norms_of_tensors[(len(tensors),)](*tables, squares, norms, TILE=MERGE_TILE)
    torch.autograd.graph.increment_version([tensors[i] for i in layout.matrices])  # else the writing goes unseen
    return norms


def _take_means(group: Group, layout: Layout, pointers: Tensor, squares: Tensor, aligned: bool) -> None:
    vector = VECTOR_BYTES // group.dtype.itemsize
    row_kernels.centralize_rows[(group.programs,)](
        pointers,
        layout.owners,
        layout.first_rows,
        layout.row_counts,
        squares,
        group.skipped,
        group.length,
        ELEMENT=ELEMENTS[group.dtype],
        ROWS=group.rows,
        TILE=group.tile,
        AT_ONCE=group.length <= group.tile,
        VECTOR=vector if aligned and group.length % vector == 0 else 1,
        num_warps=WARPS,
    )


def _only_read(group: Group, layout: Layout, pointers: Tensor, squares: Tensor) -> None:
    row_kernels.square_elements[(group.programs,)](
        pointers,
        layout.owners,
        layout.first_rows,
        layout.row_counts,
        squares,
        group.skipped,
        ELEMENT=ELEMENTS[group.dtype],
        TILE=TOGETHER,
        num_warps=WARPS,
    )


@lru_cache(maxsize=16)
def layout_of(
    device: torch.device, stream: int, tensor_shapes: tuple[torch.Size, ...], dtypes: tuple[torch.dtype, ...]
) -> Layout:
    """The layout for tensors of these shapes and dtypes.

    The stream is in the key because the tables are filled in its order: another stream might read them too early.
    """
    shapes = [_rows_and_length(shape) for shape in tensor_shapes]
    order = sorted(range(len(shapes)), key=lambda index: (str(dtypes[index]), shapes[index][1]))
    taken = [max(TOGETHER // triton.next_power_of_2(length or 1), 1) for _, length in shapes]
    counts = [-(-rows // taken[index]) for index, (rows, _) in enumerate(shapes)]
    starts = [0, *accumulate(counts[index] for index in order)]
    first = [0] * len(shapes)
    for position, index in enumerate(order):
        first[index] = starts[position]
    owners = torch.repeat_interleave(torch.tensor(order), torch.tensor([counts[index] for index in order]))
    numbers = torch.arange(starts[-1]) - torch.tensor(first)[owners]
    return Layout(
        groups=_groups(order, shapes, dtypes, taken, counts),
        matrices=tuple(index for index, (_, length) in enumerate(shapes) if length != NO_ROWS),
        programs=starts[-1],
        owners=on_device(owners.int(), device),
        first_rows=on_device((numbers * torch.tensor(taken)[owners]).int(), device),
        row_counts=upload([rows for rows, _ in shapes], torch.int32, device),
        first_programs=upload(first, torch.int32, device),
        program_counts=upload(counts, torch.int32, device),
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
