# mypy: disable-error-code="import-not-found, import-untyped"
"""Centralizing on CUDA: all matrices in one launch for each dtype and row length, and their norms on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
import triton
from torch import Tensor

from hookline.gradients import row_kernels
from hookline.stats.cuda_path import ELEMENTS
from hookline.stats.layout import VECTOR_BYTES, on_device, upload

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
AT_ONCE = 8192  # elements of a row that one program holds in its registers
TOGETHER = 4096  # elements that one program takes of shorter rows
WARPS = 8
MERGE_TILE = 1024


@dataclass(frozen=True)
class Group:
    """The programs for rows of one dtype and length: they stand together, as a kernel is compiled for such."""

    dtype: torch.dtype
    length: int
    rows: int  # that one program takes
    skipped: int
    programs: int


@dataclass(frozen=True)
class Layout:
    """Which program takes which rows; everything about a launch except where the matrices are."""

    groups: tuple[Group, ...]
    programs: int
    owners: Tensor  # int32, the matrix of each program
    first_rows: Tensor  # int32, of each program
    row_counts: Tensor  # int32, of each matrix
    first_programs: Tensor  # int32, of each matrix
    program_counts: Tensor  # int32, of each matrix


def fits(matrix: Tensor) -> bool:
    """Whether the kernels can take it: its rows lie one after the other."""
    return matrix.dtype in DTYPES and matrix.is_contiguous() and matrix.numel() > 0


def centralize(matrices: Sequence[Tensor]) -> Tensor:
    """Take from each row of each matrix its mean, in place; returns the norms of what is left. All on one device."""
    device = matrices[0].device
    with torch.cuda.device(device):
        return launch(matrices, device, torch.cuda.current_stream().cuda_stream)


def launch(matrices: Sequence[Tensor], device: torch.device, stream: int) -> Tensor:
    """Queue the kernels; nothing waits for the device."""
    shapes = tuple([(len(matrix), matrix.numel() // len(matrix)) for matrix in matrices])
    layout = layout_of(device, stream, shapes, tuple([matrix.dtype for matrix in matrices]))
    addresses = [matrix.data_ptr() for matrix in matrices]
    pointers = upload(addresses, torch.int64, device)
    squares = torch.empty(layout.programs, dtype=torch.float32, device=device)
    norms = torch.empty(len(matrices), dtype=torch.float32, device=device)
    aligned = not any(address % VECTOR_BYTES for address in addresses)
    for group in layout.groups:
        _take_means(group, layout, pointers, squares, aligned)
    tables = layout.first_programs, layout.program_counts
    row_kernels.norms_of_tensors[(len(matrices),)](*tables, squares, norms, TILE=MERGE_TILE)
    torch.autograd.graph.increment_version(matrices)  # the kernel's writing goes unseen otherwise
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
        TILE=min(triton.next_power_of_2(group.length), AT_ONCE),
        AT_ONCE=group.length <= AT_ONCE,
        VECTOR=vector if aligned and group.length % vector == 0 else 1,
        num_warps=WARPS,
    )


@lru_cache(maxsize=16)
def layout_of(
    device: torch.device, stream: int, shapes: tuple[tuple[int, int], ...], dtypes: tuple[torch.dtype, ...]
) -> Layout:
    """The layout for matrices of these shapes and dtypes.

    The stream is in the key because the tables are filled in its order: another stream might read them too early.
    """
    order = sorted(range(len(shapes)), key=lambda index: (str(dtypes[index]), shapes[index][1]))
    taken = [max(TOGETHER // triton.next_power_of_2(length), 1) for _, length in shapes]
    counts = [-(-rows // taken[index]) for index, (rows, _) in enumerate(shapes)]
    starts = [0, *accumulate(counts[index] for index in order)]
    first = [0] * len(shapes)
    for position, index in enumerate(order):
        first[index] = starts[position]
    owners = torch.repeat_interleave(torch.tensor(order), torch.tensor([counts[index] for index in order]))
    numbers = torch.arange(starts[-1]) - torch.tensor(first)[owners]
    return Layout(
        groups=_groups(order, shapes, dtypes, taken, counts),
        programs=starts[-1],
        owners=on_device(owners.int(), device),
        first_rows=on_device((numbers * torch.tensor(taken)[owners]).int(), device),
        row_counts=upload([rows for rows, _ in shapes], torch.int32, device),
        first_programs=upload(first, torch.int32, device),
        program_counts=upload(counts, torch.int32, device),
    )


def _groups(
    order: Sequence[int],
    shapes: Sequence[tuple[int, int]],
    dtypes: Sequence[torch.dtype],
    taken: Sequence[int],
    counts: Sequence[int],
) -> tuple[Group, ...]:
    programs: dict[tuple[torch.dtype, int, int], int] = {}
    for index in order:
        kind = (dtypes[index], shapes[index][1], taken[index])
        programs[kind] = programs.get(kind, 0) + counts[index]
    starts = accumulate(programs.values(), initial=0)
    return tuple(Group(*kind, start, count) for (kind, count), start in zip(programs.items(), starts, strict=False))
