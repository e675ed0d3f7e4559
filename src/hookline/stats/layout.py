"""How a set of tensors is cut into chunks for one launch: tables on the device, made once for shapes that repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

VECTOR_BYTES = 16  # what one thread loads at once; chunks start at such boundaries
CHUNK_BYTES = 128 * 1024


@dataclass(frozen=True)
class Group:
    """The chunks of one dtype: they stand together, because a kernel is compiled for one dtype."""

    dtype: torch.dtype
    skipped: int
    chunks: int


@dataclass(frozen=True)
class Layout:
    """Which program reads what; everything about a launch except where the tensors are."""

    groups: tuple[Group, ...]
    chunks: int
    sizes: Tensor  # int64, elements per tensor
    first_chunks: Tensor  # int32, per tensor
    chunk_counts: Tensor  # int32, per tensor
    owners: Tensor  # int32, the tensor of each chunk


@lru_cache(maxsize=64)
def layout_of(
    device: torch.device,
    stream: int,
    sizes: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    chunk_bytes: int = CHUNK_BYTES,
) -> Layout:
    """The layout for tensors of these sizes and dtypes.

    The stream is in the key because the tables are filled in its order: another stream might read them too early.
    """
    counts = [_chunks_needed(size, dtype, chunk_bytes) for size, dtype in zip(sizes, dtypes, strict=True)]
    order = sorted(range(len(sizes)), key=lambda index: str(dtypes[index]))
    starts = [0, *accumulate(counts[index] for index in order)]
    first_chunks = [0] * len(sizes)
    for position, index in enumerate(order):
        first_chunks[index] = starts[position]
    owners = torch.repeat_interleave(
        torch.tensor(order, dtype=torch.int32), torch.tensor([counts[index] for index in order])
    )
    return Layout(
        groups=_groups(order, counts, dtypes),
        chunks=starts[-1],
        sizes=upload(sizes, torch.int64, device),
        first_chunks=upload(first_chunks, torch.int32, device),
        chunk_counts=upload(counts, torch.int32, device),
        owners=on_device(owners, device),
    )


def _chunks_needed(size: int, dtype: torch.dtype, chunk_bytes: int) -> int:
    """Enough chunks for any alignment: the first may begin up to one vector before the tensor does."""
    return -(-(size * dtype.itemsize + VECTOR_BYTES - 1) // chunk_bytes) if size else 0


def _groups(order: Sequence[int], counts: Sequence[int], dtypes: Sequence[torch.dtype]) -> tuple[Group, ...]:
    totals: dict[torch.dtype, int] = {}
    for index in order:
        totals[dtypes[index]] = totals.get(dtypes[index], 0) + counts[index]
    starts = accumulate(totals.values(), initial=0)
    return tuple(
        Group(dtype, start, total) for (dtype, total), start in zip(totals.items(), starts, strict=False) if total
    )


def kept_table(device: torch.device, numbers: tuple[int, ...]) -> Tensor:
    """Numbers on the device as int64, kept for the next time that the same ones are wanted. Only to be read.

    So are the addresses of tensors: those that a step frees, the next one gets again, mostly for the same tensors.
    """
    return _kept_table(device, current_stream(device), numbers)


@lru_cache(maxsize=64)
def _kept_table(device: torch.device, stream: int, numbers: tuple[int, ...]) -> Tensor:
    """The stream is in the key for the same reason as in that of `layout_of`."""
    return upload(numbers, torch.int64, device)


def current_stream(device: torch.device) -> int:
    """The stream that is now in use on the device, as a key; 0 where there are none."""
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch._C._cuda_getCurrentRawStream(index)  # what Triton asks, too; ten times as quick as a Stream object


def upload(numbers: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on the device, copied in the stream's order without waiting for it."""
    return on_device(torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda"), device)


def on_device(table: Tensor, device: torch.device) -> Tensor:
    """A table on the device, copied from pinned memory, so that the host does not wait."""
    if device.type == "cuda" and not table.is_pinned():
        table = table.pin_memory()
    return table.to(device, non_blocking=True)
