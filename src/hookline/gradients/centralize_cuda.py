# mypy: disable-error-code="import-not-found, import-untyped"
"""Centralize gradients on CUDA: one launch for all rows of one dtype and length, which also finds every norm."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_

import torch
import triton
from torch import Tensor

from hookline import _device
from hookline._device import to_device, upload
from hookline.gradients import centralize_kernels
from hookline.stats.cuda import ELEMENTS
from hookline.stats.layout import VECTOR_BYTES, Launch, number_programs
from hookline.stats.tensor_meta import TensorMeta, tensor_meta

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
AT_ONCE = 8192  # elements of a row that one program holds in registers
TOGETHER = 4096  # elements that one program handles of shorter rows and of vectors
NO_ROWS = 0  # the row length of vectors and scalars: their elements are rows, and only read
MOST_ROWS = 2**31 - TOGETHER
WARPS = 8
MERGE_TILE = 1024


@dataclass(frozen=True)
class Layout:
    """Which program handles which rows: everything about the launches except the tensors' addresses."""

    take_means: tuple[Launch, ...]  # from pointers to squares, one for each group
    find_norms: Launch  # from squares to norms
    matrices: tuple[int, ...]  # which of the tensors have rows
    programs: int


def centralize(tensors: list[Tensor]) -> tuple[Tensor | None, list[Tensor]]:
    """Subtract from each row of each matrix its mean, in place; the tensors must be on one device.

    Returns:
        The norms afterwards of those that the kernels handle, and the other tensors, which are left as they were.
    """
    meta, others = tensor_meta(tensors), []
    if not all_fit(meta) or not all(map(Tensor.is_contiguous, tensors)):
        fitting = [tensor for tensor in tensors if tensor.is_contiguous() and _fits(tensor.shape, tensor.dtype)]
        taken = set(map(id, fitting))
        others = [tensor for tensor in tensors if id(tensor) not in taken]
        tensors, meta = fitting, tensor_meta(fitting)
    if not tensors:
        return None, others
    with _device.use(tensors[0].device):
        return launch(tensors, meta, tensors[0].device), others


@lru_cache(maxsize=16)
def all_fit(meta: TensorMeta) -> bool:
    """Return whether the kernels can handle tensors of these shapes and dtypes, if they are contiguous."""
    return all(map(_fits, meta.shapes, meta.dtypes))


def _fits(shape: torch.Size, dtype: torch.dtype) -> bool:
    countable = len(shape) > 1 or shape.numel() < MOST_ROWS
    return dtype in DTYPES and shape.numel() > 0 and countable


def launch(tensors: list[Tensor], meta: TensorMeta, device: torch.device) -> Tensor:
    """Queue the kernels without waiting for the device; return the norm of every gradient after them."""
    stream, addresses = _device.stream_handle(device), tuple(map(Tensor.data_ptr, tensors))
    # Vectorised loads need memory that begins at multiples of 16 bytes.
    layout = layout_of(device, stream, meta, reduce(or_, addresses, 0) % VECTOR_BYTES == 0)
    pointers = _device.cached_table(device, addresses)
    squares = torch.empty(layout.programs, dtype=torch.float32, device=device)
    norms = torch.empty(len(tensors), dtype=torch.float32, device=device)
    for take_means in layout.take_means:
        take_means(stream, pointers, squares)
    layout.find_norms(stream, squares, norms)
    torch.autograd.graph.increment_version([tensors[i] for i in layout.matrices])  # kernels do not do it by themselves
    return norms


@lru_cache(maxsize=16)
def layout_of(device: torch.device, stream: int, meta: TensorMeta, aligned: bool) -> Layout:
    """Make the layout for tensors of these shapes and dtypes; `aligned` ones begin at multiples of 16 bytes.

    The stream is part of the key, because the tables are filled in its order: another stream might read them too early.
    """
    # How many rows each tensor has, and how long they are.
    shapes = [
        (shape[0], shape.numel() // shape[0]) if len(shape) > 1 else (shape.numel(), NO_ROWS) for shape in meta.shapes
    ]
    taken = [_rows_per_program(length) for _, length in shapes]
    counts = [-(-rows // taken[index]) for index, (rows, _) in enumerate(shapes)]
    kinds = [(dtype, length) for dtype, (_, length) in zip(meta.dtypes, shapes, strict=True)]
    first, owners, groups = number_programs(counts, kinds)
    numbers = torch.arange(sum(counts)) - torch.tensor(first)[owners]
    tables = (
        to_device(owners, device),
        to_device((numbers * torch.tensor(taken)[owners]).int(), device),  # the first row of each program
        upload([rows for rows, _ in shapes], torch.int32, device),
    )
    programs = upload(first, torch.int32, device), upload(counts, torch.int32, device)  # of each tensor
    return Layout(
        take_means=tuple(_take_means(*kind, *place, tables, aligned) for kind, place in groups.items()),
        find_norms=Launch(centralize_kernels.norms_of_tensors, len(shapes), *programs, TILE=MERGE_TILE),
        matrices=tuple(index for index, (_, length) in enumerate(shapes) if length != NO_ROWS),
        programs=sum(counts),
    )


def _rows_per_program(length: int) -> int:
    rows: int = max(TOGETHER // triton.next_power_of_2(length or 1), 1)
    return rows


def _take_means(
    dtype: torch.dtype, length: int, skipped: int, programs: int, tables: tuple[Tensor, ...], aligned: bool
) -> Launch:
    """Return the launch for all rows of one dtype and length; `skipped` is its first program's number."""
    element = ELEMENTS[dtype]
    if length == NO_ROWS:
        fixed = (centralize_kernels.square_elements, programs, *tables, skipped)
        return Launch(*fixed, num_warps=WARPS, ELEMENT=element, TILE=TOGETHER)
    vector, padded = VECTOR_BYTES // dtype.itemsize, triton.next_power_of_2(length)
    return Launch(
        centralize_kernels.centralize_rows,
        programs,
        *tables,
        skipped,
        length,
        num_warps=WARPS,
        ELEMENT=element,
        ROWS=_rows_per_program(length),
        TILE=min(padded, AT_ONCE),
        AT_ONCE=padded <= AT_ONCE,
        VECTOR=vector if aligned and length % vector == 0 else 1,
    )
